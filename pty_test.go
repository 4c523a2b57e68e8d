//go:build linux || darwin

package main

import (
	"io"
	"testing"
	"strings"
	"os"
)

func TestPTYSmoke(t *testing.T) {
	for _, c := range []string{"stty size; tty; exit 3", "kill -9 $$", "sleep 20 & echo x", "read -p 'a? ' x </dev/null; stty -a; ls -l /proc/self/fd; grep Sig /proc/self/status"} {
		p, err := startPTY([]string{"bash", "-c", c}, os.Environ(), "", Size{Rows: 30, Cols: 100, XPixel: 7, YPixel: 9}, nil)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		_, err = io.Copy(&b, p)
		t.Logf("%q %v %d", b.String(), err, p.Wait())
		p.Close()
	}
}
