package store

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/store/sockets"
)

// TestSweepJobsOfServer: each process that opens a server's store sweeps it, since it has no owner.
func TestSweepJobsOfServer(t *testing.T) {
	t.Parallel()
	url, p := server(t)
	if _, err := Init(t.Context(), url, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	s := open(t, url)
	job := filepath.Join(s.Runtime, "job-dead")
	if err := os.Mkdir(job, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(job, "a"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	old := time.Now().Add(-2 * sockets.SweepAge)
	if err := errors.Join(l.Close(), os.Chtimes(job, old, old)); err != nil {
		t.Fatal(err)
	}
	shut(t, open(t, url))
	if _, err := os.Stat(job); err == nil {
		t.Error("the directory of a dead job is still there")
	}
	shut(t, s)
	p.end()
}

// TestServerWarnings: a server's warnings are logged at debug level, its errors as errors.
func TestServerWarnings(t *testing.T) {
	t.Parallel()
	for level, want := range map[slog.Level]string{slog.LevelDebug: "DEBUG about its cache", slog.LevelInfo: ""} {
		var out bytes.Buffer
		log := serverLogger(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level})))
		log.Warn("about its cache")
		if got := strings.ReplaceAll(out.String(), "msg=\"", ""); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("at level %v: %q", level, got)
		}
		log.Error("broken")
		if !strings.Contains(out.String(), "level=ERROR msg=broken") {
			t.Errorf("at level %v an error is lost: %q", level, out.String())
		}
	}
}

// TestRemove: stores in use and foreign directories stay.
func TestRemove(t *testing.T) {
	t.Parallel()
	if err := Remove(t.Context(), filepath.Join(t.TempDir(), "none")); err != nil {
		t.Error(err)
	}
	dir := made(t)
	s := open(t, dir)
	wrong(t, Remove(t.Context(), dir), ErrLocked, dir)
	shut(t, s)
	if err := Remove(t.Context(), dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("it is still there")
	}
	other := t.TempDir()
	write(t, filepath.Join(other, "precious"), "text")
	wrong(t, Remove(t.Context(), other), ErrNotEmpty, "precious")
}
