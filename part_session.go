package main

// cmdRun is `atlasbridge run`; cmdHook is `atlasbridge hook`.
func cmdRun(c *command) int  { return 0 }
func cmdHook(c *command) int { return 0 }
