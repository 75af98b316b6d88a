// Prints the devices of this machine, of all vendors: what an agent written in Go needs of `anyaccel --json`.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
)

type device struct {
	ID           string  `json:"id"`
	Vendor       string  `json:"vendor"`
	Type         string  `json:"type"`
	MemoryBytes  *uint64 `json:"memory_bytes"` // null: unknown
	Visible      bool    `json:"visible"`
	Health       string  `json:"health"`
	HealthReason *string `json:"health_reason"`
}

type failure struct {
	Code    string  `json:"code"`
	Message string  `json:"message"`
	Hint    *string `json:"hint"`
}

type status struct {
	Schema  string   `json:"schema"`
	Devices []device `json:"devices"`
	Error   *failure `json:"error"`
}

// An error is a document on standard output too, so the exit status alone says nothing.
func devices() ([]device, error) {
	output, err := exec.Command("anyaccel", "--json", "--no-stats").Output()
	var document status
	if json.Unmarshal(output, &document) != nil {
		return nil, fmt.Errorf("anyaccel --json: %w", err)
	}
	if document.Error != nil {
		return nil, fmt.Errorf("%s: %s", document.Error.Code, document.Error.Message)
	}
	if document.Schema != "anyaccel.status/1" {
		return nil, fmt.Errorf("unknown document %q", document.Schema)
	}
	return document.Devices, nil
}

func main() {
	found, err := devices()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, each := range found {
		memory := "unknown"
		if each.MemoryBytes != nil {
			memory = fmt.Sprintf("%d MiB", *each.MemoryBytes>>20)
		}
		fmt.Printf("%s %s %s %s\n", each.Vendor, each.Type, memory, each.Health)
	}
}
