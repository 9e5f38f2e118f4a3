package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

const trialName = projections.DefaultTrial

// made returns the directory of a new store.
func made(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	return dir
}

func open(t *testing.T, location string) *Store {
	t.Helper()
	s, err := Open(t.Context(), Options{Location: location})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(t, s) })
	return s
}

func shut(t *testing.T, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// refused checks that an open fails with an error, and with parts in its text.
func refused(t *testing.T, o Options, is error, parts ...string) {
	t.Helper()
	s, err := Open(t.Context(), o)
	if err == nil {
		shut(t, s)
		t.Fatal("it was opened")
	}
	wrong(t, err, is, parts...)
}

func wrong(t *testing.T, err, is error, parts ...string) {
	t.Helper()
	if is != nil && !errors.Is(err, is) {
		t.Errorf("error %v is not %q", err, is)
	}
	for _, part := range parts {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v does not contain %q", err, part)
		}
	}
}

// metrics returns a fact with an ID chosen by the test.
func metrics(id, run string, iteration int) (events.Fact, error) {
	return events.NewFact(events.Stamp{ID: id, Source: "test", Time: time.Now()},
		events.Scope{Run: run, Trial: trialName, Actor: events.Rank(0)},
		events.Metrics{Attempt: 1, Iteration: iteration, Step: int64(iteration), Metrics: map[string]any{"loss": 0.5}})
}

func say(t *testing.T, s *Store, run string, bodies ...events.Body) {
	t.Helper()
	for _, b := range bodies {
		f, err := events.NewFact(Stamp("test"), events.Scope{Run: run, Trial: trialName, Actor: events.Node(0)}, b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Log.Append(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
}

// decide appends a decision at the end of its lane.
func decide(ctx context.Context, s *Store, run string, body events.Body) (events.Recorded, error) {
	agg := events.Aggregate{Run: run, Trial: trialName}
	d, err := events.NewDecision(Stamp("test"), agg, body)
	if err != nil {
		return events.Recorded{}, err
	}
	end, err := s.Log.LaneEnd(ctx, agg)
	if err != nil {
		return events.Recorded{}, err
	}
	seq, err := s.Log.Decide(ctx, d, end)
	return events.Recorded{Event: d.Event, Sequence: seq}, err
}

func must(t *testing.T, s *Store, run string, bodies ...events.Body) {
	t.Helper()
	for _, b := range bodies {
		if _, err := decide(t.Context(), s, run, b); err != nil {
			t.Fatal(err)
		}
	}
}

func begun(name string) events.CheckpointBegun {
	return events.CheckpointBegun{Attempt: 1, Checkpoint: name + ".a1", Name: name, WorldSize: 1, Participants: []int{0}}
}

func ask[T any](t *testing.T, s *Store, q query.Query[T], p query.Params) T {
	t.Helper()
	got, err := query.Ask(t.Context(), s.Views(), q, p)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func digest(t *testing.T, s *Store) string {
	t.Helper()
	return ask(t, s, query.Digest, query.Params{})
}

// logged returns the IDs of all events of the log.
func logged(ctx context.Context, s *Store) (ids []string, err error) {
	last, err := s.Log.Last(ctx)
	if err != nil {
		return nil, err
	}
	for e, err := range s.Log.Read(ctx, 1, last) {
		if err != nil {
			return nil, err
		}
		ids = append(ids, e.ID)
	}
	return ids, nil
}

// onceEach checks that the log has every acknowledged event, and each event once.
func onceEach(t *testing.T, s *Store, acked []string) {
	t.Helper()
	ids, err := logged(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(ids)
	for i := 1; i < len(ids); i++ {
		if ids[i] == ids[i-1] {
			t.Errorf("event %s is in the log twice", ids[i])
		}
	}
	lost := 0
	for _, id := range acked {
		if _, found := slices.BinarySearch(ids, id); !found {
			lost++
		}
	}
	if lost > 0 {
		t.Errorf("%d of %d acknowledged events are not in the log of %d", lost, len(acked), len(ids))
	}
}

var content = []byte("sixteen bytes ok")

// written begins a checkpoint and writes its files.
func written(t *testing.T, s *Store, run string, step int64) (*data.FileWriter, checkpoint.Manifest) {
	t.Helper()
	name := fmt.Sprintf("step-%d", step)
	b := begun(name)
	b.Step = step
	must(t, s, run, b)
	layout := checkpoint.Layout{Tensors: []checkpoint.Tensor{{
		FQN: "w", DType: tensor.Uint8, Shape: tensor.Shape{int64(len(content))},
		Chunks: []checkpoint.Chunk{{Rank: 0, Box: tensor.Shape{int64(len(content))}.Full()}},
	}}}
	w := s.Data.Writer(refOf(run, b.Checkpoint))
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	got, err := w.WriteData(t.Context(), 0, layout.Items(0), bytesOf{})
	if err != nil {
		t.Fatal(err)
	}
	done := events.WriteCompleted{Attempt: 1, Checkpoint: b.Checkpoint, IndexDigest: got.Index.String(), BytesWritten: got.BytesWritten}
	for _, f := range got.Files {
		done.Files = append(done.Files, events.File{Name: f.Name, Size: f.Size})
	}
	say(t, s, run, done)
	return w, checkpoint.Manifest{
		Store: s.ID, Run: run, Trial: trialName, Checkpoint: b.Checkpoint, Name: name, Step: step, Attempt: 1, WorldSize: 1,
		Ranks: []checkpoint.RankIndex{{Rank: 0, Index: got.Index}}, Layout: layout,
	}
}

// committed commits a new checkpoint and returns its directory.
func committed(t *testing.T, s *Store, run string, step int64) string {
	t.Helper()
	w, m := written(t, s, run, step)
	if _, err := w.Finish(t.Context(), m, decision(s, m)); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(s.Data.Dir(), refOf(run, m.Checkpoint).String())
}

// decision returns a function that commits a checkpoint in the log.
func decision(s *Store, m checkpoint.Manifest) func(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
	return func(ctx context.Context, sum checkpoint.Digest) (checkpoint.Decision, error) {
		r, err := decide(ctx, s, m.Run, events.CheckpointCommitted{Attempt: 1, Checkpoint: m.Checkpoint, Manifest: sum.String(), Bytes: m.Layout.Bytes()})
		return checkpoint.Decision{Sequence: r.Sequence, Event: r.ID, Time: r.Time}, err
	}
}

// refuse is a log that accepts no commit.
func refuse(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
	return checkpoint.Decision{}, errors.New("refused")
}

func refOf(run, id string) checkpoint.Ref {
	return RefOf(projections.Checkpoint{Run: run, Trial: trialName, ID: id})
}

type bytesOf struct{}

func (bytesOf) Item(int) ([]byte, error) { return content, nil }

// become gives up the superuser's rights for good.
func become(uid int) error { return syscall.Setuid(uid) }

// snapshot returns every file below dir with its content, and every directory, with a slash.
func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			files[path+"/"] = ""
			return nil
		}
		data, err := os.ReadFile(path)
		files[path] = string(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// put replaces the content of dir with a snapshot.
func put(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	remove(t, dir, "")
	for path, text := range files {
		if !strings.HasSuffix(path, "/") {
			write(t, path, text)
		}
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
