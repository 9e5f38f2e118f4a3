package api

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/store/sockets"
)

// finderEnv makes the test binary a process that looks for servers, as `ckptstore ui` does, until
// its standard input ends.
const finderEnv = "CKPTSTORE_TEST_FINDER"

// findRecords reads all records again and again. It returns the exit code.
func findRecords() int {
	dir, err := sockets.UserDir(serversName)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	fmt.Println("ready")
	for {
		paths, _ := filepath.Glob(filepath.Join(dir, "*.json"))
		for _, path := range paths {
			_, _, _ = readRecord(path) // removes what it takes for a dead server's
		}
		select {
		case <-ended:
			return 0
		default:
		}
	}
}

// TestAnnounce: other processes that look for servers never see a record that is not complete and
// locked, and so never remove that of a server that is just starting.
func TestAnnounce(t *testing.T) {
	for range 3 {
		c := exec.CommandContext(t.Context(), os.Args[0])
		c.Env = append(os.Environ(), finderEnv+"=1")
		c.Stderr = os.Stderr
		in, err := c.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			_ = in.Close()
			if err := c.Wait(); err != nil {
				t.Error(err)
			}
		}()
		if _, err := out.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 500 {
		s := &Server{Record: Record{Store: "announced", URL: "http://127.0.0.1:1/", PID: os.Getpid(), Started: time.Now()}}
		record, path, err := s.announce()
		if err != nil {
			t.Fatal(err)
		}
		r, alive, err := readRecord(path)
		if err != nil || !alive || r.URL != s.URL {
			t.Fatalf("server %d: %+v, %v, %v", i, r, alive, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := record.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
