package sockets

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// SweepOthers removes the runtime directories next to own that dead processes have left. It
// leaves those that it cannot remove to the next owner.
func SweepOthers(own string, log *slog.Logger) {
	dirs, err := filepath.Glob(filepath.Join(filepath.Dir(own), "ckptstore-????????????"))
	if err != nil {
		return // only for a bad pattern
	}
	for _, dir := range dirs {
		if dir == own {
			continue
		}
		if err := sweep(dir); err != nil {
			log.Debug("runtime directory not removed", "directory", dir, "error", err)
		}
	}
}

// sweep removes a runtime directory that no living process uses: no process has the store
// open, all sockets refuse, and no file in it is locked. It holds the exclusive lock meanwhile.
func sweep(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() || !mine(info) || time.Since(info.ModTime()) < SweepAge {
		return err
	}
	held, err := lock(dir, unix.LOCK_EX)
	if err != nil || held == nil {
		return err
	}
	defer held.Close()
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case e.Type() == os.ModeSocket:
			conn, err := net.Dial("unix", path)
			if err == nil {
				_ = conn.Close()
			}
			if !errors.Is(err, unix.ECONNREFUSED) {
				return err // it answers, or has just disappeared
			}
		case e.IsDir():
			// A job of a version without the directory lock has no sockets between two
			// attempts.
			info, err := e.Info()
			sockets, dead := socketsIn(path)
			if err != nil || !dead || sockets == 0 && time.Since(info.ModTime()) < 24*time.Hour {
				return err
			}
		case e.Type().IsRegular():
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
				return err // an agent uses it
			}
		default:
			return fmt.Errorf("%s is a %v, which ckptstore does not make", path, e.Type())
		}
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return os.Remove(dir) // fails, as it should, if a new entry has appeared
}

// SweepAge is how long a job's directory must be unchanged before it is swept: a new socket may
// not be listened on yet.
const SweepAge = time.Minute

// SweepJobs removes the socket directories of jobs whose trainers were killed: those with sockets
// that all refuse. A directory without sockets may belong to a job between two attempts.
func SweepJobs(runtime string) error {
	dirs, err := filepath.Glob(filepath.Join(runtime, "job-*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		info, err := os.Stat(dir)
		if err != nil || time.Since(info.ModTime()) < SweepAge || !deserted(dir) {
			continue
		}
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return nil
}

// deserted reports whether dir has sockets and no process listens on any.
func deserted(dir string) bool {
	sockets, dead := socketsIn(dir)
	return sockets > 0 && dead
}

// socketsIn counts the sockets of dir and reports whether all of them refuse.
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

func mine(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid()
}
