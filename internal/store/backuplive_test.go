package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/tensor"
)

// cutPatience is how long a process waits for an owner that cuts its log all the time: on a
// busy machine, several cuts in a row may take many seconds.
const cutPatience = time.Minute

// train saves checkpoints forever and prints each acknowledged one; every few checkpoints it
// deletes all but the newest. It is a separate process, which may own the store and cuts its
// log often.
func train(ctx context.Context) error {
	run := os.Getenv("CKPTSTORE_TEST_RUN")
	s, err := Open(ctx, Options{Location: os.Getenv("CKPTSTORE_TEST_DIR"), cutting: &often, Patience: cutPatience})
	if err != nil {
		return err
	}
	for step := int64(1); ; step++ {
		if err := saveOnce(ctx, s, run, step); err != nil {
			return err
		}
		fmt.Printf("{\"acknowledged\":%q}\n", fmt.Sprintf("%s@step-%d.a1", run, step))
		for i := range 10 {
			f, err := metrics(NewID(), run, int(step)*10+i)
			if err == nil {
				_, err = s.Log.Append(ctx, f)
			}
			if err != nil {
				return err
			}
		}
		if step%7 != 0 || run == "kept" {
			continue
		}
		policy, err := retention.Parse("last=3")
		if err == nil {
			_, err = s.Collect(ctx, collection.Options{Runs: []string{run}, Policy: policy, Apply: true})
		}
		if err != nil {
			return err
		}
		fmt.Printf("{\"acknowledged\":%q}\n", fmt.Sprintf("%s collected %d", run, step))
	}
}

// saveOnce is written and committed without a test.
func saveOnce(ctx context.Context, s *Store, run string, step int64) error {
	name := fmt.Sprintf("step-%d", step)
	b := begun(name)
	b.Step = step
	if _, err := decide(ctx, s, run, b); err != nil {
		return err
	}
	layout := checkpoint.Layout{Tensors: []checkpoint.Tensor{{
		FQN: "w", DType: tensor.Uint8, Shape: tensor.Shape{int64(len(content))},
		Chunks: []checkpoint.Chunk{{Rank: 0, Box: tensor.Shape{int64(len(content))}.Full()}},
	}}}
	w := s.Data.Writer(refOf(run, b.Checkpoint))
	if err := w.SetUp(ctx, true); err != nil {
		return err
	}
	got, err := w.WriteData(ctx, 0, layout.Items(0), bytesOf{})
	if err != nil {
		return err
	}
	m := checkpoint.Manifest{
		Store: s.ID, Run: run, Trial: trialName, Checkpoint: b.Checkpoint, Name: name, Step: step, Attempt: 1, WorldSize: 1,
		Ranks: []checkpoint.RankIndex{{Rank: 0, Index: got.Index}}, Layout: layout,
	}
	done := events.WriteCompleted{Attempt: 1, Checkpoint: b.Checkpoint, IndexDigest: got.Index.String(), BytesWritten: got.BytesWritten}
	for _, f := range got.Files {
		done.Files = append(done.Files, events.File{Name: f.Name, Size: f.Size})
	}
	f, err := events.NewFact(Stamp("test"), events.Scope{Run: run, Trial: trialName, Actor: events.Node(0)}, done)
	if err == nil {
		_, err = s.Log.Append(ctx, f)
	}
	if err != nil {
		return err
	}
	_, err = w.Finish(ctx, m, decision(s, m))
	return err
}

// live returns the acknowledged checkpoints that cannot have been deleted: all of a run that
// keeps them, otherwise those since the last collection.
func live(acked []string) (ids []string) {
	for _, a := range acked {
		if run, _, collected := strings.Cut(a, " collected "); collected {
			ids = slices.DeleteFunc(ids, func(id string) bool { return strings.HasPrefix(id, run+"@") })
			continue
		}
		ids = append(ids, a)
	}
	return ids
}

// trainers are processes that save while a test backs up.
type trainers map[string]*process

func startTrainers(t *testing.T, dir string) trainers {
	t.Helper()
	all := trainers{}
	for _, run := range []string{"kept", "collected", "other"} {
		all[run] = start(t, "train", "CKPTSTORE_TEST_DIR="+dir, "CKPTSTORE_TEST_RUN="+run)
	}
	for run, p := range all {
		eventually(t, run+" saves", func() bool { return len(p.acknowledged()) > 8 })
	}
	return all
}

// backUpAndCompare makes a backup and checks that it has everything acknowledged before.
func (all trainers) backUpAndCompare(t *testing.T, s *Store, to string, o BackupOptions) Backed {
	t.Helper()
	before := map[string][]string{}
	for run, p := range all {
		before[run] = p.acknowledged()
	}
	out := backedUpTo(t, s, to, o)
	if len(out.Incomplete) > 0 {
		t.Errorf("incomplete: %v", out.Incomplete)
	}
	for run, p := range all {
		// A later collection may have deleted them.
		if after := p.acknowledged(); run != "kept" && slices.ContainsFunc(after[len(before[run]):], func(a string) bool { return strings.Contains(a, " collected ") }) {
			before[run] = nil
		}
	}
	got := wholeCopy(t, to)
	n := 0
	for run, acked := range before {
		kept := live(acked)
		if run != "kept" && len(kept) > 0 {
			kept = kept[len(kept)-1:] // a collection may be under way, and keeps the newest
		}
		for _, id := range kept {
			n++
			if _, ok := got[id]; !ok {
				t.Errorf("%s was acknowledged before the backup, which does not list it (cut at %d, %d passes)", id, out.Sequence, out.Passes)
			}
		}
	}
	t.Logf("%d acknowledged before, %d listed and whole, %d passes, %d events", n, len(got), out.Passes, out.Sequence)
	return out
}

// TestBackupWhileTraining makes backups of a store that three processes save to and collect
// in, with constant cuts of the log: first as a client of their owner, then while owners are
// killed one by one, and last while the backup itself owns the store. Each backup has
// everything acknowledged before it, with every bit intact.
func TestBackupWhileTraining(t *testing.T) {
	t.Parallel()
	dir := made(t)
	all := startTrainers(t, dir)
	s, err := Open(t.Context(), Options{Location: dir, cutting: &often, Patience: cutPatience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(t, s) })
	if s.Owns() {
		t.Fatal("a trainer owns the store first")
	}
	for i := range 3 {
		to := filepath.Join(t.TempDir(), "backup")
		all.backUpAndCompare(t, s, to, BackupOptions{Link: i == 1})
		if i == 2 {
			again := open(t, restored(t, to))
			if err := saveOnce(t.Context(), again, "kept", 1<<30); err != nil {
				t.Error(err)
			}
		}
	}
	if sealedOf(t, s.Log) == 0 {
		t.Error("the log was not cut")
	}
	for len(all) > 0 {
		owner := ""
		eventually(t, "one owns the store", func() bool {
			c, err := readCard(dir)
			for run, p := range all {
				if err == nil && c.PID == p.pid() {
					owner = run
				}
			}
			return owner != "" || s.Owns()
		})
		if owner == "" {
			break
		}
		victim, at := all[owner], []string{"", "the rest is copied", "looked", "copied run kept"}[len(all)]
		others := trainers{}
		for run, p := range all {
			if p != victim {
				others[run] = p
			}
		}
		before := live(victim.acknowledged())
		to := filepath.Join(t.TempDir(), "backup")
		others.backUpAndCompare(t, s, to, BackupOptions{step: func(name string) error {
			if name == at && victim.cmd.ProcessState == nil {
				victim.kill()
			}
			return nil
		}})
		got := wholeCopy(t, to)
		for _, id := range before {
			if _, ok := got[id]; owner == "kept" && !ok {
				t.Errorf("%s of the killed owner is not in the backup", id)
			}
		}
		all = others
	}
	eventually(t, "this process owns the store", s.Owns)
	all.backUpAndCompare(t, s, filepath.Join(t.TempDir(), "backup"), BackupOptions{})
}

// TestBackupEndsWithItsContext: an interrupted backup returns an error, and the next one
// finishes it.
func TestBackupEndsWithItsContext(t *testing.T) {
	t.Parallel()
	_, s := furnished(t)
	to := filepath.Join(t.TempDir(), "backup")
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	_, err := s.Backup(ctx, to, BackupOptions{step: func(string) error { cancel(); return nil }})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	backedUpTo(t, s, to, BackupOptions{})
	wholeCopy(t, to)
}

// TestBackupOfDeletions: a deletion during the copy moves the cut behind the decision, so that
// the copy lists no checkpoint without files.
func TestBackupOfDeletions(t *testing.T) {
	t.Parallel()
	_, s := furnished(t)
	for i := range int64(6) {
		committed(t, s, "one", 100+i)
	}
	policy, err := retention.Parse("last=1")
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "backup")
	step := int64(200)
	deletions := 0
	out := backedUpTo(t, s, to, BackupOptions{step: func(name string) error {
		// Checkpoints already copied, and those that the pass has found and not copied yet.
		if name == "pass" || name == "copied run one" || name == "looked" {
			if deletions++; deletions < 12 {
				step++
				committed(t, s, "one", step)
				_, err := s.Collect(t.Context(), collection.Options{Runs: []string{"one"}, Policy: policy, Apply: true})
				return err
			}
		}
		return nil
	}})
	if len(out.Incomplete) > 0 || out.Passes < 2 {
		t.Errorf("%+v", out)
	}
	// Opening the copy would remove the deleted checkpoints.
	if got := wholeCopy(t, to); out.Checkpoints != len(got) {
		t.Errorf("%d directories, %d listed", out.Checkpoints, len(got))
	}
	if !exists(filepath.Join(to, "data/one/main/step-1.a1", checkpoint.ReceiptFile)) {
		t.Error("the tagged checkpoint is not there")
	}
}
