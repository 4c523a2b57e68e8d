// Command atlasbridge (manual page comes here).
package main

import (
	"context"
	"os"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// run is main with its surroundings as arguments, so that a test can call it. It returns the exit code.
func run(ctx context.Context, args []string, stdin, stdout, stderr *os.File) int { return 0 }
