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

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

func policy(t *testing.T, text string) retention.Policy {
	t.Helper()
	p, err := retention.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func collect(t *testing.T, s *Store, text string) collection.Collection {
	t.Helper()
	out, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, text), Apply: true})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// went lists the checkpoints that a collection acts on.
func went(out collection.Collection) string {
	var ids []string
	for _, c := range out.Checkpoints {
		if c.Action != collection.Keep {
			ids = append(ids, fmt.Sprintf("%s %s", c.Action, c.ID))
		}
	}
	slices.Sort(ids)
	return strings.Join(ids, ", ")
}

// visible returns the IDs of the line's checkpoints, after checking that each is intact.
func visible(t *testing.T, s *Store, run string) string {
	t.Helper()
	var ids []string
	for _, c := range ask(t, s, query.Checkpoints, query.Params{Run: run}) {
		ids = append(ids, c.ID)
		whole(t, s, c)
	}
	slices.Sort(ids)
	return strings.Join(ids, " ")
}

// whole checks that every byte of a checkpoint is readable.
func whole(t *testing.T, s *Store, c projections.Checkpoint) {
	t.Helper()
	report, err := s.Learn(t.Context(), c, nil)
	if err != nil || len(report.Findings) > 0 {
		t.Errorf("%s@%s: %v, %v", c.Run, c.ID, report.Findings, err)
	}
}

func TestCollect(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	for step := range int64(4) {
		committed(t, s, "run", step)
	}
	before := snapshot(t, s.Data.Dir())

	shown, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=2")})
	if err != nil || went(shown) != "delete step-0.a1, delete step-1.a1" || shown.Applied {
		t.Errorf("shown are %+v, %v", shown, err)
	}
	if after := snapshot(t, s.Data.Dir()); len(after) != len(before) || visible(t, s, "run") != "step-0.a1 step-1.a1 step-2.a1 step-3.a1" {
		t.Error("something was done without --apply")
	}

	done := collect(t, s, "last=2")
	if went(done) != went(shown) || done.Freed != shown.Freed || done.Freed == 0 {
		t.Errorf("done are %s, %d bytes; shown were %s, %d", went(done), done.Freed, went(shown), shown.Freed)
	}
	if got := visible(t, s, "run"); got != "step-2.a1 step-3.a1" {
		t.Errorf("left are %s", got)
	}
	for path := range snapshot(t, s.Data.Dir()) {
		if strings.Contains(path, "step-0") || strings.Contains(path, "step-1.") {
			t.Errorf("%s is left", path)
		}
	}
	if again := collect(t, s, "last=2"); went(again) != "" || again.Freed != 0 {
		t.Errorf("a second collection did %s", went(again))
	}
	rows := ask(t, s, query.Checkpoints, query.Params{Run: "run", All: true})
	if last := rows[len(rows)-1]; last.State != projections.Deleted || !strings.Contains(last.Reason, "retention last=2: no rule keeps it") {
		t.Errorf("the log has %+v", last)
	}
	_, err = s.Collect(t.Context(), collection.Options{Runs: []string{"missing"}})
	wrong(t, err, projections.ErrNotFound, "missing")
}

// TestCollectInFlight: an uncommitted save is not a successor, and continues during a
// collection. After its abort the last good checkpoint still exists; the files of the save
// are removed.
func TestCollectInFlight(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	committed(t, s, "run", 1)
	committed(t, s, "run", 2)
	w, m := written(t, s, "run", 3)
	if got := went(collect(t, s, "last=1")); got != "delete step-1.a1" {
		t.Errorf("it did %s", got)
	}
	if got := visible(t, s, "run"); got != "step-2.a1" {
		t.Errorf("left are %s", got)
	}
	if _, err := w.Finish(t.Context(), m, decision(s, m)); err != nil {
		t.Fatal(err)
	}
	if got := went(collect(t, s, "last=1")); got != "delete step-2.a1" {
		t.Errorf("it did %s", got)
	}
	if got := visible(t, s, "run"); got != "step-3.a1" {
		t.Errorf("left are %s", got)
	}

	_, failing := written(t, s, "run", 4)
	must(t, s, "run", events.CheckpointStaged{Attempt: 1, Checkpoint: failing.Checkpoint})
	if got := went(collect(t, s, "last=1,superseded=delete")); got != "" {
		t.Errorf("with a staged save it did %s", got)
	}
	must(t, s, "run", events.CheckpointAborted{Attempt: 1, Checkpoint: failing.Checkpoint, Reason: "test"})
	if got := went(collect(t, s, "last=1,superseded=delete")); got != "sweep step-4.a1" {
		t.Errorf("after the abort it did %s", got)
	}
	if got := visible(t, s, "run"); got != "step-3.a1" {
		t.Errorf("left are %s", got)
	}
	if c := ask(t, s, query.Resolve, query.Params{Ref: "run@latest"}); c.ID != "step-3.a1" {
		t.Errorf("the latest is %s", c.ID)
	}
}

// TestCollectCut: after a crash before any step, the newest checkpoint is intact and no
// checkpoint without files is listed. The next open or collection reaches the same end.
func TestCollectCut(t *testing.T) {
	t.Parallel()
	for k := 0; ; k++ {
		dir := made(t)
		s := open(t, dir)
		for step := range int64(4) {
			committed(t, s, "run", step)
		}
		_, aborted := written(t, s, "run", 4)
		must(t, s, "run", events.CheckpointAborted{Attempt: 1, Checkpoint: aborted.Checkpoint, Reason: "test"})
		ctx, cancel := context.WithCancel(t.Context())
		n, cut := 0, false
		_, err := s.Collect(ctx, collection.Options{Policy: policy(t, "last=1"), Apply: true, At: func(step string) error {
			if n++; n > k {
				cut = true
				cancel()
				return errors.New("cut before: " + step)
			}
			return nil
		}})
		cancel()
		if !cut {
			if err != nil || k != 7 { // three decisions and four removals
				t.Errorf("%d steps, %v", k, err)
			}
			return
		}
		for _, c := range ask(t, s, query.Checkpoints, query.Params{Run: "run"}) {
			whole(t, s, c)
		}
		shut(t, s)
		if k%2 == 0 { // offline: checkpoints with receipts have their files
			if list := listed(t, dir); !strings.Contains(list, "step-3.a1") {
				t.Errorf("cut at %d: offline it lists %s", k, list)
			}
		}
		s = open(t, dir)
		collect(t, s, "last=1")
		if got := visible(t, s, "run"); got != "step-3.a1" {
			t.Errorf("cut at %d: left are %s", k, got)
		}
		if list := listed(t, dir); list != "step-3.a1" {
			t.Errorf("cut at %d: offline it lists %s", k, list)
		}
		if dirs, err := os.ReadDir(filepath.Join(s.Data.Dir(), "run", trialName)); err != nil || len(dirs) != 1 {
			t.Errorf("cut at %d: directories %v, %v", k, dirs, err)
		}
		shut(t, s)
	}
}

// TestCollectFinishedAtOpen: the next process that opens the store removes the files of
// deleted checkpoints, without a collection.
func TestCollectFinishedAtOpen(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	gone := committed(t, s, "run", 1)
	committed(t, s, "run", 2)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := s.Collect(ctx, collection.Options{Policy: policy(t, "last=1"), Apply: true, At: func(step string) error {
		if strings.HasPrefix(step, "remove") {
			cancel()
			return errors.New("cut")
		}
		return nil
	}})
	if err == nil || !exists(gone) {
		t.Fatalf("it was not cut before the files: %v", err)
	}
	shut(t, s)
	s = open(t, dir)
	if exists(gone) || visible(t, s, "run") != "step-2.a1" {
		t.Error("the files of a deleted checkpoint are left after the store was opened")
	}
}

// TestCollectConflict: a collection respects a decision made meanwhile.
func TestCollectConflict(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	for step := range int64(4) {
		committed(t, s, "run", step)
	}
	n := 0
	out, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=1"), Apply: true, At: func(step string) error {
		if n++; n == 2 { // one decision is made, the next is not
			if _, err := s.Pin(t.Context(), "run@step-2.a1", "keep this"); err != nil {
				t.Error(err)
			}
		}
		return nil
	}})
	if err != nil || went(out) != "delete step-0.a1, delete step-1.a1" {
		t.Errorf("it did %s, %v", went(out), err)
	}
	if got := visible(t, s, "run"); got != "step-2.a1 step-3.a1" {
		t.Errorf("left are %s", got)
	}
}

// TestCollectLoading: checkpoints that a restore reads stay, even if it began after the
// decision; their files are removed after it has ended.
func TestCollectLoading(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	must(t, s, "run", events.GroupStarted{Attempt: 1, WorldSize: 1, Job: "j1"})
	first := committed(t, s, "run", 1)
	committed(t, s, "run", 2)
	committed(t, s, "run", 3)
	must(t, s, "other", events.GroupStarted{Attempt: 1, WorldSize: 1, Job: "j2"},
		events.RestoreBegun{Attempt: 1, Load: 1, Checkpoint: "step-2.a1", From: "run/main", WorldSize: 1})
	out, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=1"), Apply: true, Runs: []string{"run"}, At: func(step string) error {
		if strings.HasPrefix(step, "decide") {
			must(t, s, "other", events.RestoreBegun{Attempt: 1, Load: 2, Checkpoint: "step-1.a1", From: "run/main", WorldSize: 1})
		}
		return nil
	}})
	if err != nil || went(out) != "delete step-1.a1" {
		t.Fatalf("it did %s, %v", went(out), err)
	}
	i := slices.IndexFunc(out.Checkpoints, func(c collection.Collected) bool { return c.ID == "step-1.a1" })
	if out.Checkpoints[i].Left == "" || out.Freed != 0 || !exists(first) {
		t.Errorf("a restore lost its files: %+v", out.Checkpoints[i])
	}
	say(t, s, "other", events.RestoreCompleted{Attempt: 1, Load: 1, Checkpoint: "step-2.a1"}, events.RestoreCompleted{Attempt: 1, Load: 2, Checkpoint: "step-1.a1"})
	if got := went(collect(t, s, "last=1")); got != "delete step-2.a1, sweep step-1.a1" || exists(first) {
		t.Errorf("after the restores it did %s", got)
	}
}

// TestCollectSuccessor: nothing is deleted while the newest checkpoint is incomplete.
func TestCollectSuccessor(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(dir string) error{
		"its directory is gone": os.RemoveAll,
		"a file of data is gone": func(dir string) error {
			return os.Remove(filepath.Join(dir, "r00000.safetensors"))
		},
		"a file is cut": func(dir string) error { return os.Truncate(filepath.Join(dir, "r00000.safetensors"), 5) },
		"its manifest is damaged": func(dir string) error {
			m, err := filepath.Glob(filepath.Join(dir, "manifest-*"))
			return errors.Join(err, os.WriteFile(m[0], []byte("x"), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := open(t, made(t))
			kept := committed(t, s, "run", 1)
			newest := committed(t, s, "run", 2)
			if err := spoil(newest); err != nil {
				t.Fatal(err)
			}
			before := snapshot(t, kept)
			out, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=1"), Apply: true})
			wrong(t, err, nil, "nothing is deleted", "ckptstore verify run@step-2.a1")
			if went(out) != "" || len(snapshot(t, kept)) != len(before) {
				t.Errorf("the last good one is gone: %+v", out)
			}
		})
	}
}

// TestCollectLinks: a file with a link from another checkpoint is not counted as freed, and
// stays there.
func TestCollectLinks(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	var dirs []string
	for step := range int64(4) {
		dirs = append(dirs, committed(t, s, "run", step))
	}
	big := make([]byte, 1<<20)
	for i, links := range [][]int{{1}, {3}, nil, nil} { // 0 shares with 1, which goes too; 1 with 3, which stays
		name := fmt.Sprintf("shared-%d.link", i)
		if len(links) == 0 {
			continue
		}
		if err := os.WriteFile(filepath.Join(dirs[i], name), big, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, to := range links {
			if err := os.Link(filepath.Join(dirs[i], name), filepath.Join(dirs[to], name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	shown, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=1")})
	if err != nil {
		t.Fatal(err)
	}
	done := collect(t, s, "last=1")
	freed := map[string]int64{}
	for i, c := range done.Checkpoints {
		freed[c.ID] = c.Freed >> 20
		if j := slices.IndexFunc(shown.Checkpoints, func(x collection.Collected) bool { return x.ID == c.ID }); shown.Checkpoints[j].Freed != c.Freed {
			t.Errorf("%d: %s frees %d, shown were %d", i, c.ID, c.Freed, shown.Checkpoints[j].Freed)
		}
	}
	if want := "map[step-0.a1:0 step-1.a1:1 step-2.a1:0 step-3.a1:0]"; fmt.Sprint(freed) != want {
		t.Errorf("freed are %v MiB, want %s", freed, want)
	}
	if info, err := os.Stat(filepath.Join(dirs[3], "shared-1.link")); err != nil || info.Size() != 1<<20 {
		t.Errorf("the shared file: %v", err)
	}
}

// TestCollectOthers: a missing directory is not an error. Copied-in directories stay: under a
// name that the log does not know, and in the place of a deleted checkpoint.
func TestCollectOthers(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	gone := committed(t, s, "run", 1)
	taken := committed(t, s, "run", 2)
	committed(t, s, "run", 3)
	copied, bare := filepath.Join(s.Data.Dir(), "run", trialName, "copy"), filepath.Join(s.Data.Dir(), "run", trialName, "bare")
	if err := errors.Join(os.CopyFS(copied, os.DirFS(taken)), os.CopyFS(bare, os.DirFS(taken)), os.Remove(filepath.Join(bare, checkpoint.ReceiptFile)), os.RemoveAll(gone), os.RemoveAll(taken), os.CopyFS(taken, os.DirFS(filepath.Join(s.Data.Dir(), "run", trialName, "step-3.a1")))); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, s.Data.Dir())
	out := collect(t, s, "last=1")
	if went(out) != "delete step-1.a1, delete step-2.a1" || out.Freed != 0 {
		t.Errorf("it did %s and freed %d", went(out), out.Freed)
	}
	for _, c := range out.Checkpoints {
		if (c.Left != "") != (c.ID == "step-2.a1") {
			t.Errorf("%s: left %q", c.ID, c.Left)
		}
	}
	after := snapshot(t, s.Data.Dir())
	for path := range before {
		if _, ok := after[path]; !ok {
			t.Errorf("%s was removed", path)
		}
	}
}

// TestMark: other processes see pins and tags, which keep their checkpoints.
func TestMark(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	for step := range int64(4) {
		committed(t, s, "run", step)
	}
	if c, err := s.Pin(t.Context(), "run@step-0", "paper"); err != nil || !c.Pinned || c.PinReason != "paper" {
		t.Errorf("pinned is %+v, %v", c, err)
	}
	if c, from, err := s.Tag(t.Context(), "run@step-1", "gold"); err != nil || from != "" || !slices.Equal(c.Tags, []string{"gold"}) {
		t.Errorf("tagged is %+v from %q, %v", c, from, err)
	}
	if c, from, err := s.Tag(t.Context(), "run@step-2", "gold"); err != nil || from != "step-1.a1" || !slices.Equal(c.Tags, []string{"gold"}) {
		t.Errorf("tagged is %+v from %q, %v", c, from, err)
	}
	if c := ask(t, s, query.Resolve, query.Params{Ref: "run@gold"}); c.ID != "step-2.a1" {
		t.Errorf("run@gold is %s", c.ID)
	}
	if got := went(collect(t, s, "last=1")); got != "delete step-1.a1" {
		t.Errorf("it did %s", got)
	}
	before, err := s.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // an existing mark needs no decision
		_, err1 := s.Pin(t.Context(), "run@step-0", "paper")
		_, _, err2 := s.Tag(t.Context(), "run@gold", "gold")
		_, err3 := s.Unpin(t.Context(), "run@step-3")
		if err := errors.Join(err1, err2, err3); err != nil {
			t.Error(err)
		}
	}
	if after, err := s.Log.Last(t.Context()); err != nil || after != before {
		t.Errorf("%d events more, %v", after-before, err)
	}
	if c, err := s.Untag(t.Context(), "run@gold", "gold"); err != nil || len(c.Tags) != 0 {
		t.Errorf("untagged is %+v, %v", c, err)
	}
	if c, err := s.Unpin(t.Context(), "run@step-0"); err != nil || c.Pinned {
		t.Errorf("unpinned is %+v, %v", c, err)
	}
	if got := went(collect(t, s, "last=1")); got != "delete step-0.a1, delete step-2.a1" {
		t.Errorf("it did %s", got)
	}
	_, err = s.Untag(t.Context(), "run@step-3", "gold")
	wrong(t, err, projections.ErrNotFound, "gold", "it has none")
	_, err = s.Pin(t.Context(), "run@step-0.a1", "")
	wrong(t, err, projections.ErrNotFound, "deleted")
	for _, tag := range []string{"", "latest", "best:loss:min", "a@b", "a/b", "a\nb", strings.Repeat("x", 129), "step-3", "step-3.a1"} {
		_, _, err := s.Tag(t.Context(), "run@step-3", tag)
		wrong(t, err, ErrTag)
	}
}
