package store

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// sweepAge is how long nothing was made in a job's directory that is swept. A
// socket that was made just now may not be listened on yet.
const sweepAge = time.Minute

// sweepJobs removes the socket directories of jobs whose trainers were killed:
// those with sockets that all refuse. One without sockets may be that of a job
// between two attempts.
func sweepJobs(runtime string) error {
	dirs, err := filepath.Glob(filepath.Join(runtime, "job-*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		info, err := os.Stat(dir)
		if err != nil || time.Since(info.ModTime()) < sweepAge || !deserted(dir) {
			continue
		}
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return nil
}

// deserted reports whether dir has sockets and nobody listens on any.
func deserted(dir string) bool {
	sockets, dead := socketsIn(dir)
	return sockets > 0 && dead
}

// socketsIn counts the sockets of dir, and reports whether all of them refuse.
func socketsIn(dir string) (sockets int, dead bool) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if e.Type() != fs.ModeSocket {
			continue
		}
		conn, err := net.Dial("unix", filepath.Join(dir, e.Name()))
		if err == nil {
			_ = conn.Close()
		}
		sockets++
		if !errors.Is(err, unix.ECONNREFUSED) {
			return sockets, false
		}
	}
	return sockets, err == nil
}
