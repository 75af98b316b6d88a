"""joblib and Optuna on the devices of a pool; each package is imported on first use."""
