/*
Atlasbridge runs an AI command line unchanged in a pseudo-terminal and carries every question it asks to
your phone: you tap, it types, exactly once.

	atlasbridge run [flags] <tool> [args…]
	atlasbridge setup | doctor | status | approvals | answer ID VALUE | logs | audit verify

# Description

Every `atlasbridge run` is a whole bridge for its own session: no daemon, no server, no open port. What
sessions share, they share through files in the state folder: who asked what and who answered
(state.jsonl), what happened (audit.log, a hash chain), and a lock that says who listens to Telegram.
Without Telegram, questions wait for the keyboard or for `atlasbridge answer`.

`atlasbridge help` lists the commands, `atlasbridge help COMMAND` explains one.

# Files

	~/.atlasbridge/                  0700  ATLASBRIDGE_HOME, else STORAGE_PATH, moves it
	~/.atlasbridge/config.toml       0600  settings; `atlasbridge help config`
	~/.atlasbridge/state.jsonl       0600  sessions, prompts, replies: JSON Lines
	~/.atlasbridge/audit.log         0600  what happened: JSON Lines, each with the hash of the one before
	~/.atlasbridge/atlasbridge.log   0600  troubles and their causes; at 1 MiB renamed to atlasbridge.log.1

# Exit status

The child's own; 128+N when signal N killed it; 1 a check failed (doctor, audit verify, lab) or a command
did; 2 usage; 125 atlasbridge failed before the child ran; 126 the tool cannot be executed; 127 not found.

# Security

Who holds the bot token and an allowed account can type into your terminal. The token is read from a file
only you can read, and appears in no log, error, argument list, bundle or child environment. Nothing is ever
approved by waiting.
*/
package main

import (
	"context"
	"os"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// run is main with its surroundings as arguments, so that a test can call it. It returns the exit code.
func run(ctx context.Context, args []string, stdin, stdout, stderr *os.File) int {
	c := &command{ctx: ctx, stdin: stdin, stdout: stdout, stderr: stderr, getenv: os.Getenv}
	if len(args) == 0 {
		writeHelp(stderr)
		return exitUsage
	}
	c.name, c.args = args[0], args[1:]
	switch c.name {
	case "-h", "-help", "--help":
		c.name = "help"
	case "-v", "-version", "--version":
		c.name = "version"
	}
	if c.spec() == nil {
		return c.usage("unknown command %q", c.name)
	}
	var code int
	if c.opts, code = c.options(); c.opts == nil {
		return code
	}
	return c.spec().do(c)
}
