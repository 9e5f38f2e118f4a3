package space

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/internal/data"
)

// TestGauge refuses below the limit, and checks again after a while.
func TestGauge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free, looks := uint64(ForFacts-1), 0
		g := &Gauge{Dir: "ckpts", Usage: func() (data.Usage, error) { looks++; return data.Usage{Free: free, Size: 100 << 20}, nil }}
		var full *NoSpaceError
		for range 3 {
			if err := g.Admit(); !errors.As(err, &full) || !errors.Is(err, syscall.ENOSPC) || full.Free != free {
				t.Fatalf("%d bytes free: %v", free, err)
			}
		}
		if err := g.Check(ToOwn); err != nil {
			t.Errorf("enough to own: %v", err)
		}
		if looks != 1 {
			t.Errorf("looked %d times at once", looks)
		}
		free++
		time.Sleep(time.Second) //nolint:forbidigo // the bubble's clock, not a wait
		if err := g.Admit(); err != nil {
			t.Errorf("%d bytes free: %v", free, err)
		}
	})
}

// TestShares: at 90 % facts are refused, and a save must leave more than that.
func TestShares(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		size, free uint64
		refused    bool
	}{
		{1 << 40, 1 << 39, false},
		{10 << 40, 4 << 30, false}, // a large disk: 4 GiB are enough
		{10 << 40, 4<<30 - 1, true},
		{1000 << 20, 100<<20 + 1, false},
		{1000 << 20, 100 << 20, true}, // exactly 90 %
		{1000 << 20, 10 << 20, true},
		{100 << 20, 16 << 20, false}, // a small disk: 16 MiB are more than 10 %
		{100 << 20, 16<<20 - 1, true},
	} {
		u := data.Usage{Free: c.free, Size: c.size}
		g := &Gauge{Dir: "ckpts", Usage: func() (data.Usage, error) { return u, nil }}
		err := g.Admit()
		if (err != nil) != c.refused || c.refused && (!errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "% full, has ")) {
			t.Errorf("%d of %d bytes free: %v", c.free, c.size, err)
		}
		left := data.Usage{Free: uint64(OfSaves(u)), Size: c.size}
		g = &Gauge{Dir: "ckpts", Usage: func() (data.Usage, error) { return left, nil }}
		if err := g.Admit(); err != nil {
			t.Errorf("a save on a disk of %d bytes may leave %d, with which facts are refused: %v", c.size, left.Free, err)
		}
	}
}

// TestBallast makes, releases and makes again.
func TestBallast(t *testing.T) {
	t.Parallel()
	u := data.Usage{Free: 1 << 30, Size: 2 << 30}
	path := filepath.Join(t.TempDir(), BallastName)
	b := Ballast{path: path, space: &Gauge{Usage: func() (data.Usage, error) { return u, nil }}, log: slog.New(slog.DiscardHandler)}
	step := func(free uint64, want bool) {
		t.Helper()
		u.Free = free
		b.space.Forget()
		b.Release()
		if err := b.load(); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if (err == nil) != want || want && (info.Size() != BallastSize || info.Sys().(*syscall.Stat_t).Blocks*512 < BallastSize) {
			t.Errorf("with %d bytes free there is %v, %v", free, info, err)
		}
	}
	step(1<<30, true)
	step(ToOwn, true)
	step(ToOwn-1, false)
	step(uint64(OfSaves(u))+BallastSize-1, false)
	step(uint64(OfSaves(u))+BallastSize, true)
}
