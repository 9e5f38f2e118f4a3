package launch_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/tensor"
)

// model is a state of so many equal tensors, which together have about so many
// bytes.
func model(tensors, bytes int) client.State {
	var s client.State
	size := int64(bytes / tensors)
	for i := range tensors {
		shape := tensor.Shape{size}
		s.Tensors = append(s.Tensors, client.Tensor{
			Shard: tensor.Shard{FQN: fmt.Sprintf("layers.%d.weight", i), DType: tensor.Uint8, Global: shape, Box: shape.Full()},
			Data:  slices.Repeat([]byte{byte(i)}, int(size)),
		})
	}
	return s
}

// blocks times the saves of a state and warm copies of it in turn: TENSORS BYTES
// SAVES. With a directory as a further argument, it prints the memory left after
// a garbage collection, and rests after a save while the directory has a file
// named after the number of saves.
var blocks = role("blocks", func(ctx context.Context, args []string) error {
	var n [3]int
	for i, arg := range args[:len(n)] {
		var err error
		if n[i], err = strconv.Atoi(arg); err != nil {
			return err
		}
	}
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	state := model(n[0], n[1])
	warm := make([]byte, n[1])
	duplicate := func() {
		at := warm
		for _, t := range state.Tensors {
			at = at[copy(at, t.Data):]
		}
	}
	duplicate()
	save := func(step int64) error { // with a deadline of its own: there can be any number
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*patience)
		defer cancel()
		began := time.Now()
		duplicate()
		copied := time.Since(began)
		began = time.Now()
		s, err := c.Save(ctx, step, state, client.SaveOptions{})
		if err != nil {
			return err
		}
		emit("save %d %d %d", step, time.Since(began), copied)
		return s.Wait(ctx, client.Committed)
	}
	for step := range n[2] {
		if err := save(int64(step)); err != nil {
			return err
		}
		if len(args) > len(n) {
			debug.FreeOSMemory()
		}
		emit("used %s", used(c.Run))
		if len(args) > len(n) {
			if err := restWhile(filepath.Join(args[len(n)], fmt.Sprint(step+1))); err != nil {
				return err
			}
		}
	}
	return nil
})

// restWhile blocks while a file is there.
func restWhile(path string) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(2 * patience); ; {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		select {
		case <-tick.C:
		case <-end:
			return fmt.Errorf("%s is still there", path)
		}
	}
}

// used is the memory of this process in KiB, its descriptors and its maps.
func used(run string) string {
	status, err := os.ReadFile("/proc/self/status")
	fds, ferr := os.ReadDir("/proc/self/fd")
	maps, merr := os.ReadFile("/proc/self/maps")
	if err := errors.Join(err, ferr, merr); err != nil {
		return err.Error()
	}
	rss := ""
	for line := range strings.Lines(string(status)) {
		if text, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			rss = strings.Fields(text)[0]
		}
	}
	return fmt.Sprintf("%s %d %d", rss, len(fds), strings.Count(string(maps), events.EncodeName(run)))
}

// inMemory is the staging files of a run and their bytes.
func inMemory(tb testing.TB, run string) (files int, bytes int64) {
	tb.Helper()
	paths, err := filepath.Glob(filepath.Join(memory, "*", "*"+events.EncodeName(run)+"*", "r*"))
	if err != nil {
		tb.Fatal(err)
	}
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil { // it may just have gone
			files, bytes = files+1, bytes+info.Size()
		}
	}
	return files, bytes
}

// BenchmarkBlocking reports how long a save blocks its rank, compared with a copy
// of the same bytes into warm memory: medians of the saves 3 to 7.
func BenchmarkBlocking(b *testing.B) {
	const bytes = 256 << 20
	for _, tensors := range []int{64, 3500} {
		b.Run(fmt.Sprint(tensors, " tensors"), func(b *testing.B) {
			for b.Loop() {
				out := newTranscript()
				cfg := config(fmt.Sprint("blocking ", time.Now().UnixNano()), 1, append(slices.Clone(blocks), fmt.Sprint(tensors), fmt.Sprint(bytes), "7"), out, newTranscript())
				if err := runJobIn(b, cfg); err != nil {
					b.Fatalf("%v\n%s", err, out)
				}
				var saves, copies []float64
				for i, line := range out.lines("save ") {
					var step, save, duplicate int64
					if _, err := fmt.Sscan(line, &step, &save, &duplicate); err != nil {
						b.Fatal(err)
					}
					b.Logf("save %d: %.1f ms, copy %.1f ms", i+1, float64(save)/1e6, float64(duplicate)/1e6)
					if i >= 2 {
						saves, copies = append(saves, float64(save)/1e6), append(copies, float64(duplicate)/1e6)
					}
				}
				slices.Sort(saves)
				slices.Sort(copies)
				const gb = bytes / 1e9
				b.ReportMetric(saves[len(saves)/2]/gb, "save-ms/GB")
				b.ReportMetric(copies[len(copies)/2]/gb, "copy-ms/GB")
				b.ReportMetric(saves[len(saves)/2]-1.25*copies[len(copies)/2], "ms-over-1.25-copies")
			}
		})
	}
}
