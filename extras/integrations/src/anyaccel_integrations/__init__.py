"""joblib and Optuna on the devices of a pool, and devices for a notebook; each package is imported on first use."""
