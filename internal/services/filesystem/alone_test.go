package filesystem

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
)

// alone returns the bytes of a file that is no checkpoint of DCP, with several
// blocks of checksums.
func alone(n byte) []byte { return bytes.Repeat([]byte{'P', 'K', n, 0xff}, 60_000) }

// content reads the file at a path.
func (a *asker) content(path string) ([]byte, error) {
	var r openReply
	if err := a.ask("open", pathRequest{path}, &r); err != nil {
		return nil, err
	}
	if err := a.ask("verify", verifyRequest{Read: r.Read, Length: r.Size}, nil); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(r.Path)
	return data, errors.Join(err, a.ask("done", doneRequest{r.Read}, nil))
}

// names returns the paths below a path.
func (a *asker) names(path string) (out []string, err error) {
	var list listReply
	err = a.ask("list", pathRequest{path}, &list)
	for _, n := range list.Entries {
		out = append(out, n.Type+" "+n.Name)
	}
	return out, err
}

// TestFileAlone checks that each closed file is a checkpoint, that all its bytes
// are verified, and that a path leads to the newest one.
func TestFileAlone(t *testing.T) {
	t.Parallel()
	a, st := here(t)
	for n := range byte(3) {
		if err := a.put("run/out/ckpt.pt", alone(n)); err != nil {
			t.Fatal(err)
		}
		got, err := a.content("run/out/ckpt.pt")
		if err != nil || !bytes.Equal(got, alone(n)) {
			t.Fatalf("write %d: other bytes: %v", n, err)
		}
	}
	if err := errors.Join(a.put("run/out/step-7.pt", alone(7)), a.put("run/part/dir/x.bin", nil), a.put("run/single.d/note.json", []byte("{}"))); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string][]string{
		"run":             {"directory run/out", "directory run/part", "directory run/single.d"},
		"run/out":         {"file run/out/ckpt.pt", "file run/out/step-7.pt"},
		"run/part":        {"directory run/part/dir"},
		"run/part/dir":    {"file run/part/dir/x.bin"},
		"run/out/ckpt.pt": {"file run/out/ckpt.pt"},
	} {
		if got, err := a.names(path); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s lists %q, %v; want %q", path, got, err, want)
		}
	}
	row, err := store.Committed(t.Context(), st.Views(), "run@out~~step-7.pt")
	if err != nil {
		t.Fatal(err)
	}
	digest, err := checkpoint.ParseDigest(row.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	report, err := st.Data.Verify(t.Context(), store.RefOf(row), digest, nil)
	if err != nil || len(report.Findings)+len(report.Extra) > 0 || row.Step != 7 || row.Bytes != int64(len(alone(7))) {
		t.Errorf("%+v, %+v, %v", row, report, err)
	}
	if ranks, err := st.Data.Unlearned(t.Context(), store.RefOf(row)); err != nil || len(ranks) > 0 {
		t.Errorf("ranks %v have adopted files, %v", ranks, err)
	}
	if left, err := os.ReadDir(filepath.Join(st.Data.Dir(), ".pending")); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	step, err := filepath.Glob(filepath.Join(st.Data.Dir(), "run", "main", "*", "step-7.pt"))
	if err != nil || len(step) != 1 {
		t.Fatal(step, err)
	}
	file := step[0]
	if data, err := os.ReadFile(file); err != nil || os.WriteFile(file, append(data[:70_000:70_000], append([]byte{1}, data[70_001:]...)...), 0o644) != nil {
		t.Fatal(err)
	}
	if _, err := a.content("run/out/step-7.pt"); err == nil || !strings.Contains(err.Error(), "checksum") {
		t.Errorf("a flipped byte: %v", err)
	}
}

// TestRemovedFile checks that removed files are deleted with their bytes, and
// that pinned ones stay and are in the reply.
func TestRemovedFile(t *testing.T) {
	t.Parallel()
	a, st := here(t)
	for n := range byte(3) {
		if err := a.put(fmt.Sprintf("run/out/step-%d.pt", n), alone(n)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := st.Pin(t.Context(), "run@out~~step-1.pt", "a paper needs it"); err != nil {
		t.Fatal(err)
	}
	var reply removeReply
	if err := a.ask("remove", removeRequest{Path: "run/out/step-0.pt"}, &reply); err != nil || len(reply.Kept) > 0 {
		t.Errorf("%+v, %v", reply, err)
	}
	if err := a.ask("remove", removeRequest{Path: "run/out"}, nil); err == nil || !strings.Contains(err.Error(), "recursive") {
		t.Errorf("a directory: %v", err)
	}
	if err := a.ask("remove", removeRequest{Path: "run/out", Recursive: true}, &reply); err != nil || len(reply.Kept) != 1 || reply.Kept[0].Reason != "pinned" {
		t.Errorf("%+v, %v", reply, err)
	}
	if _, err := a.names("run/out"); err == nil {
		t.Error("it is there still")
	}
	dirs, err := filepath.Glob(filepath.Join(st.Data.Dir(), "run", "main", "*"))
	if err != nil || len(dirs) != 1 || !strings.Contains(dirs[0], "step-1") {
		t.Errorf("there are %q, %v", dirs, err)
	}
	if _, err := st.Unpin(t.Context(), "run/main@"+strings.Split(reply.Kept[0].Checkpoint, "@")[1]); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(a.put("run/x/a.pt", alone(9)), a.ask("remove", removeRequest{Path: "run/x", Recursive: true}, nil)); err != nil {
		t.Fatal(err)
	}
	if dirs, err := filepath.Glob(filepath.Join(st.Data.Dir(), "run", "main", "*")); err != nil || len(dirs) > 0 {
		t.Errorf("there are %q, %v", dirs, err)
	}
}

// TestFileGetsItsMetadata checks that a file that was a checkpoint becomes an
// attachment of its directory's checkpoint, or a part of a pending save.
func TestFileGetsItsMetadata(t *testing.T) {
	t.Parallel()
	a, st := here(t)
	if err := errors.Join(a.put("run/step-1/scheduler.pt", alone(1)), a.put("run/step-2/scheduler.pt", alone(2)), a.save("run/step-1", every)); err != nil {
		t.Fatal(err)
	}
	got, err := a.get("run/step-1")
	if err != nil || !bytes.Equal(got["scheduler.pt"], alone(1)) || len(got) < 3 {
		t.Errorf("%d files, %v", len(got), err)
	}
	if got, err := a.content("run/step-2/scheduler.pt"); err != nil || !bytes.Equal(got, alone(2)) {
		t.Errorf("of another directory: %v", err)
	}
	if _, err := store.Committed(t.Context(), st.Views(), "run@step-1~~scheduler.pt"); err == nil {
		t.Error("the file is a checkpoint still")
	}

	var closed closeReply
	data := slices.Collect(func(yield func(string) bool) {
		for name := range files(t, every) {
			if strings.HasSuffix(name, dataSuffix) && !yield(name) {
				return
			}
		}
	})[0]
	if err := a.put("run/step-3/"+data, files(t, every)[data]); err != nil {
		t.Fatal(err)
	}
	var made createReply
	if err := a.ask("create", createRequest{Path: "run/step-3/extra.pt"}, &made); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(made.fill(0, []byte("some")), a.ask("close", closeRequest{writeRequest{Stream: made.Stream, Length: 4}, 4}, &closed)); err != nil || !closed.Pending {
		t.Errorf("%+v, %v", closed, err)
	}
	if err := a.save("run/step-3", every); err != nil {
		t.Fatal(err)
	}
	if got, err := a.content("run/step-3/extra.pt"); err != nil || string(got) != "some" {
		t.Errorf("%q, %v", got, err)
	}
}

// TestRenamedFile checks that a file with a temporary name becomes a checkpoint
// when it gets its final name.
func TestRenamedFile(t *testing.T) {
	t.Parallel()
	a, _ := here(t)
	if err := a.put("run/out/ckpt.pt.tmp", alone(1)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.names("run"); err == nil {
		t.Error("it is a checkpoint before it has its name")
	}
	if err := a.ask("rename", renameRequest{"run/out/ckpt.pt.tmp", "run/out/ckpt.pt"}, nil); err != nil {
		t.Fatal(err)
	}
	if got, err := a.content("run/out/ckpt.pt"); err != nil || !bytes.Equal(got, alone(1)) {
		t.Error(err)
	}
	long := "run/out/" + strings.Repeat("x", 60)
	if r := (*refusal)(nil); !errors.As(a.put(long, alone(1)), &r) || r.status != http.StatusBadRequest || !strings.Contains(r.text, "another name") {
		t.Errorf("a name that is too long: %v", r)
	}
}

// TestFilesAtOnce checks that writers of one directory do not take it away from
// each other.
func TestFilesAtOnce(t *testing.T) {
	t.Parallel()
	a, _ := here(t)
	var writers sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		writers.Go(func() {
			for n := range byte(5) {
				errs[i] = errors.Join(errs[i], newAsker(t, a.at).put(fmt.Sprintf("run/out/rank%d.pt", i), alone(n)))
			}
		})
	}
	writers.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for i := range errs {
		if got, err := a.content(fmt.Sprintf("run/out/rank%d.pt", i)); err != nil || !bytes.Equal(got, alone(4)) {
			t.Errorf("rank %d: %v", i, err)
		}
	}
}

// TestKilledBesideAFile checks that a server that is killed before any request
// leaves the old or the new file, and that acknowledged files exist.
func TestKilledBesideAFile(t *testing.T) {
	t.Parallel()
	start, dir := killable(t)
	const path = "run/out/ckpt.pt"
	old := byte(0)
	a, kill := start()
	if err := a.put(path, alone(old)); err != nil {
		t.Fatal(err)
	}
	kill()
	for n, over := 0, false; !over; n++ {
		a, kill := start()
		a.left = n
		err := a.put(path, alone(old+1))
		over = err == nil && a.left >= 0
		kill()
		b, end := start()
		got, gerr := b.content(path)
		switch {
		case gerr != nil:
			t.Fatalf("after %d requests, %v: %v", n, err, gerr)
		case bytes.Equal(got, alone(old+1)):
			old++
		case err == nil || !bytes.Equal(got, alone(old)):
			t.Fatalf("after %d requests, %v: neither the old nor the new file", n, err)
		}
		if left, err := os.ReadDir(filepath.Join(dir, "data", ".pending")); err != nil || len(left) > 0 {
			t.Errorf("left %v, %v", left, err)
		}
		end()
		if n > 10 {
			t.Fatal("a file takes too many requests")
		}
	}
}

// TestOneFileByMany checks that writers of one path do not corrupt each other's
// bytes; the last close wins.
func TestOneFileByMany(t *testing.T) {
	t.Parallel()
	a, st := here(t)
	var writers sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		writers.Go(func() {
			for range 5 {
				errs[i] = errors.Join(errs[i], newAsker(t, a.at).put("run/out/same.pt", alone(byte(i))))
			}
		})
	}
	writers.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	rows, err := query.Ask(t.Context(), st.Views(), query.Checkpoints, query.Params{Run: "run"})
	if err != nil || len(rows) != 40 {
		t.Fatalf("%d checkpoints, %v", len(rows), err)
	}
	for _, row := range rows {
		if row.Bytes != int64(len(alone(0))) {
			t.Errorf("%s has %d bytes", row.ID, row.Bytes)
		}
	}
	if left, err := os.ReadDir(filepath.Join(st.Data.Dir(), ".pending")); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// TestRemoveOneFile checks that entries below the path of a file, and next to it,
// stay.
func TestRemoveOneFile(t *testing.T) {
	t.Parallel()
	a, _ := here(t)
	if err := errors.Join(a.put("run/m/n", alone(1)), a.put("run/m/n/k", alone(2)), a.put("run/m/o", alone(3)), a.save("run/m/o", every)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(a.ask("remove", removeRequest{Path: "run/m/n"}, nil)); err != nil {
		t.Fatal(err)
	}
	if got, err := a.content("run/m/n/k"); err != nil || !bytes.Equal(got, alone(2)) {
		t.Error(err)
	}
	if got, err := a.get("run/m/o"); err != nil || len(got) < 2 {
		t.Errorf("%d files, %v", len(got), err)
	}
}

// TestFilesAreInNoLine checks that a single file does not count in a checkpoint's
// retention rules, and that no run resumes from it; last=N also applies to each
// file.
func TestFilesAreInNoLine(t *testing.T) {
	t.Parallel()
	a, st := here(t)
	for n := range 3 {
		if err := errors.Join(a.save(fmt.Sprintf("run/step-%d", n), every), a.put("run/logs/metrics.json", []byte("{}"))); err != nil {
			t.Fatal(err)
		}
	}
	latest, err := store.Committed(t.Context(), st.Views(), "run@latest")
	if err != nil || latest.Name != "step-2" {
		t.Errorf("the latest is %s, %v", latest.ID, err)
	}
	trial, err := query.Ask(t.Context(), st.Views(), query.Trial, query.Params{Run: "run", Trial: "main"})
	if err != nil || trial.Head != latest.ID {
		t.Errorf("the line ends with %s, %v", trial.Head, err)
	}
	policy, err := retention.Parse("last=2")
	if err != nil {
		t.Fatal(err)
	}
	done, err := st.Collect(t.Context(), collection.Options{Policy: policy, Apply: true})
	if err != nil {
		t.Fatal(err)
	}
	kept := map[string]int{}
	for _, c := range done.Checkpoints {
		if c.Action == collection.Keep {
			name, _, _ := strings.Cut(c.ID, ".a")
			kept[name]++
		}
	}
	if kept["step-1"] != 1 || kept["step-2"] != 1 || kept["logs~~metrics.json"] != 2 || len(kept) != 3 {
		t.Errorf("kept are %v", kept)
	}
}

// TestNamesWithMarks checks that misleading names are refused when they are
// written.
func TestNamesWithMarks(t *testing.T) {
	t.Parallel()
	a, _ := here(t)
	for _, path := range []string{"run/out/a~~b.pt", "run/out/~x.pt", "run/out~/x.pt", "run/d~~1/__0_0.distcp", "run/~d/x.pt"} {
		if r := (*refusal)(nil); !errors.As(a.put(path, alone(1)), &r) || r.status != http.StatusBadRequest || !strings.Contains(r.text, "~~") {
			t.Errorf("%s: %v", path, r)
		}
	}
	if err := a.put("run/a~b/x.pt", alone(1)); err != nil {
		t.Error(err)
	}
	if got, err := a.names("run/a~b"); err != nil || len(got) != 1 {
		t.Error(got, err)
	}
	if got, err := a.content("run/a~b/x.pt"); err != nil || !bytes.Equal(got, alone(1)) {
		t.Error(err)
	}
}

// TestGivenUpWrites checks that nothing of abandoned writes stays, and that the
// next file of the directory is kept.
func TestGivenUpWrites(t *testing.T) {
	t.Parallel()
	a, st := here(t)
	for n := range 20 {
		for _, name := range []string{"x.pt", "__0_0.distcp"} {
			var made createReply
			if err := a.ask("create", createRequest{fmt.Sprintf("run/out/%d~%s", n, name)}, &made); err != nil {
				t.Fatal(err)
			}
			if err := a.ask("discard", discardRequest{made.Stream}, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	if left, err := os.ReadDir(filepath.Join(st.Data.Dir(), ".pending")); err != nil || len(left) > 1 {
		t.Errorf("left %v, %v", left, err)
	}
	if err := a.put("run/out/x.pt", alone(1)); err != nil {
		t.Fatal(err)
	}
	if got, err := a.content("run/out/x.pt"); err != nil || !bytes.Equal(got, alone(1)) {
		t.Error(err)
	}
}

// TestUnfinishedBesideACheckpoint checks that a file that gets its final name in
// a committed directory is attached then.
func TestUnfinishedBesideACheckpoint(t *testing.T) {
	t.Parallel()
	a, _ := here(t)
	if err := errors.Join(a.save("run/step-1", every), a.put("run/step-1/o.pt.part", alone(1)), a.ask("rename", renameRequest{"run/step-1/o.pt.part", "run/step-1/o.pt"}, nil)); err != nil {
		t.Fatal(err)
	}
	if got, err := a.get("run/step-1"); err != nil || !bytes.Equal(got["o.pt"], alone(1)) || got["o.pt.part"] != nil {
		t.Error(err)
	}
}
