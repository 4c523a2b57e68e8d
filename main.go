/*
Atlasbridge runs an AI command line unchanged in a pseudo-terminal and carries every question it asks to your
phone: you tap, it types, exactly once. `atlasbridge help` lists the commands, `help COMMAND` explains one.

Every `atlasbridge run` is a whole bridge for its own session: no daemon, no server, no open port. What sessions
share, they share through files in ~/.atlasbridge (0700; ATLASBRIDGE_HOME, else STORAGE_PATH, moves it):

	config.toml      settings; `atlasbridge config` shows those in force
	state.jsonl      sessions, prompts, replies: JSON Lines
	audit.log        what happened: JSON Lines, each with the hash of the one before
	atlasbridge.log  troubles and their causes; at 1 MiB renamed to atlasbridge.log.1

Exit status: the child's own; 128+N when signal N killed it; 1 a check or command failed; 2 usage; 125
atlasbridge failed before the child ran; 126 the tool cannot be executed; 127 not found.

Who holds the bot token and an allowed account can type into your terminal. Nothing is ever approved by waiting.
*/
package main

import (
	"cmp"
	"context"
	"os"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// run is main with its surroundings as arguments, so that a test can call it. It returns the exit code.
func run(ctx context.Context, args []string, stdin, stdout, stderr *os.File) (code int) {
	c := &command{ctx: ctx, stdin: stdin, stdout: stdout, stderr: stderr, getenv: os.Getenv}
	if len(args) == 0 {
		writeHelp(stderr)
		return exitUsage
	}
	alias := map[string]string{"-h": "help", "-help": "help", "--help": "help", "-v": "version", "--version": "version"}
	c.name, c.args = cmp.Or(alias[args[0]], args[0]), args[1:]
	if c.name == "help" && len(c.args) > 0 {
		c.name, c.args = c.args[0], []string{"-h"}
	}
	if c.spec() == nil {
		return c.usage("unknown command %q", c.name)
	}
	if c.opts, code = c.options(); c.opts == nil {
		return code
	}
	return c.spec().do(c)
}
