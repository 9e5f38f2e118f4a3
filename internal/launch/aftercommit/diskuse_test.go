package aftercommit

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/ckptstore/ckptstore/internal/data"
)

// TestDiskUse: the first commit logs how many checkpoints fit, and a nearly full
// disk is warned of once.
func TestDiskUse(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		free    []uint64 // of 100, at each commit of 2
		bounded bool
		err     error
		infos   int
		warns   int
	}{
		"room":           {free: []uint64{90, 80, 70}, infos: 1},
		"bounded":        {free: []uint64{90, 80}, bounded: true},
		"fills up":       {free: []uint64{90, 21, 20, 10}, infos: 1, warns: 1},
		"full and bound": {free: []uint64{5, 4}, bounded: true, warns: 1},
		"not known":      {free: []uint64{90, 90}, err: errors.ErrUnsupported},
	} {
		synctest.Test(t, func(t *testing.T) {
			var out bytes.Buffer
			var free uint64
			d := &DiskUse{
				log: slog.New(slog.NewTextHandler(&out, nil)), Bounded: c.bounded,
				usage: func(context.Context) (data.Usage, error) {
					return data.Usage{Free: free, Size: 100}, c.err
				},
			}
			for _, free = range c.free {
				d.Committed(2)
				synctest.Wait()
			}
			infos, warns := strings.Count(out.String(), "level=INFO"), strings.Count(out.String(), "level=WARN")
			if infos != c.infos || warns != c.warns || infos > 0 && !strings.Contains(out.String(), "more_that_fit=45") {
				t.Errorf("%s: logged\n%s", name, out.String())
			}
		})
	}
}
