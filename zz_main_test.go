package main

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	if mode := os.Getenv("ATLASBRIDGE_TEST_CHILD"); mode != "" && childPTY(mode) {
		return
	}
	os.Exit(m.Run())
}
