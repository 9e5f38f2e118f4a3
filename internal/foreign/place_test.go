package foreign

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"golang.org/x/sys/unix"
)

// put writes a file with its directories.
func put(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// tree is every path below a directory, with what the files hold.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.Walk(dir, func(name string, info os.FileInfo, err error) error {
		if err != nil || !info.Mode().IsRegular() {
			out[name] = info.Mode().Type().String()
			return err
		}
		data, err := os.ReadFile(name)
		out[name] = string(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// unharmed exports and wants a refusal that changes nothing below dir.
func unharmed(t *testing.T, below string, from data.Reader, dir string, o ExportOptions) (alien bool) {
	t.Helper()
	before := tree(t, below)
	_, err := Export(t.Context(), from, vfs.Default, dir, o)
	var occupied *OccupiedError
	if !errors.As(err, &occupied) {
		t.Fatalf("error %v, want an OccupiedError", err)
	}
	after := tree(t, below)
	for name, text := range before {
		if now, ok := after[name]; !ok || now != text {
			t.Errorf("%s is gone or changed", name)
		}
	}
	if len(after) != len(before) {
		t.Errorf("there are %d paths, there were %d", len(after), len(before))
	}
	return occupied.Alien
}

func TestExportReplacesExportsAlone(t *testing.T) {
	from := openForeign(t, nested(t).dir)
	for name, prepare := range map[string]func(dir string){
		"another name":   func(dir string) { put(t, filepath.Join(dir, "mine.safetensors"), "x") },
		"a directory":    func(dir string) { put(t, filepath.Join(dir, "model.safetensors", "thesis.tex"), "x") },
		"another distcp": func(dir string) { put(t, filepath.Join(dir, "mine.distcp"), "x") },
		"a short number": func(dir string) { put(t, filepath.Join(dir, "model-1-of-2.safetensors"), "x") },
		"a link": func(dir string) {
			put(t, filepath.Join(filepath.Dir(dir), "blob"), "x")
			if err := errors.Join(os.Mkdir(dir, 0o755), os.Symlink("../blob", filepath.Join(dir, "model.safetensors"))); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "out")
			prepare(dir)
			if !unharmed(t, filepath.Dir(dir), from, dir, ExportOptions{Format: data.SafeTensors, Replace: true}) {
				t.Error("it is taken for an export")
			}
		})
	}
}

func TestExportSparesWhatIsRead(t *testing.T) {
	top := t.TempDir()
	source := filepath.Join(top, "source")
	if err := os.CopyFS(source, os.DirFS(nested(t).dir)); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(top, "link")
	if err := os.Symlink("source", link); err != nil {
		t.Fatal(err)
	}
	from := openForeign(t, source)
	root, err := data.Open(vfs.Default, filepath.Join(top, "store", "data"))
	if err != nil {
		t.Fatal(err)
	}
	w := adoptedForExport(t, root, from)
	other := openForeign(t, nested(t).dir)
	force := ExportOptions{Format: data.DCP, Replace: true}
	for _, dir := range []string{source, link, filepath.Join(source, "sub"), filepath.Join(link, "sub"), top} {
		unharmed(t, top, from, dir, force)
	}
	for _, dir := range []string{source, link} {
		unharmed(t, top, w, dir, force)
		unharmed(t, top, other, dir, ExportOptions{Format: data.DCP, Replace: true, Keep: root})
	}
	unharmed(t, top, w, filepath.Join(top, "store", "data", "new"), force)
}

// adoptedForExport writes the indexes and the manifest: enough to read.
func adoptedForExport(t *testing.T, root *data.Root, from *data.Foreign) data.Reader {
	t.Helper()
	ref := checkpoint.RefOf("r", "main", "c")
	w := root.Writer(ref)
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	for _, r := range from.Manifest().Ranks {
		if _, err := w.AdoptData(t.Context(), r.Rank, from.Items(r.Rank), from); err != nil {
			t.Fatal(err)
		}
	}
	data := checkpoint.EncodeManifest(from.Manifest())
	digest := checkpoint.Sum(data)
	put(t, filepath.Join(root.Dir(), ref.String(), "manifest-"+digest.String()), string(data))
	return root.Reader(ref).WithManifest(digest)
}

func TestExportKeepsFilesThatCome(t *testing.T) {
	from := openForeign(t, nested(t).dir)
	for name, replace := range map[string]bool{"into an empty directory": false, "in place of an export": true} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "out")
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if replace {
				if _, err := Export(t.Context(), from, vfs.Default, dir, ExportOptions{Format: data.DCP}); err != nil {
					t.Fatal(err)
				}
			}
			late := filepath.Join(dir, "late")
			_, err := Export(t.Context(), from, vfs.Default, dir, ExportOptions{
				Format: data.DCP, Replace: replace, Progress: func(int64) { put(t, late, "x") },
			})
			var occupied *OccupiedError
			if !errors.As(err, &occupied) || occupied.Holds != "late" && !replace && occupied.Holds == "" {
				t.Errorf("error %v", err)
			}
			if text, err := os.ReadFile(late); err != nil || string(text) != "x" {
				t.Errorf("the file that came holds %q: %v", text, err)
			}
			if beside, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(beside) != 1 {
				t.Errorf("%v are left: %v", beside, err)
			}
		})
	}
}

func TestExportTellsOfWhatIsStale(t *testing.T) {
	from := openForeign(t, nested(t).dir)
	top := t.TempDir()
	dir := filepath.Join(top, "out")
	put(t, dir+".partial-killed/.lock", "")
	put(t, dir+".partial-4711/__0_0.distcp", "x")
	put(t, dir+".replaced-killed/.metadata", "x")
	put(t, dir+"put.partial-other/x", "x")
	var told []string
	o := ExportOptions{Format: data.DCP, Stale: func(dir string, replaced bool) {
		if replaced != strings.Contains(dir, ".replaced-") {
			t.Errorf("%s: replaced is %v", dir, replaced)
		}
		told = append(told, filepath.Base(dir))
	}}
	if _, err := Export(t.Context(), from, vfs.Default, dir, o); err != nil {
		t.Fatal(err)
	}
	slices.Sort(told)
	if want := []string{"out.partial-4711", "out.partial-killed", "out.replaced-killed"}; !slices.Equal(told, want) {
		t.Errorf("told of %v, want %v", told, want)
	}
}

// TestExportAtWorkIsNotStale asks while one is at work, in this process, on a
// filesystem that many processes share, and in another process.
func TestExportAtWorkIsNotStale(t *testing.T) {
	from := openForeign(t, nested(t).dir)
	asked := 0
	ask := func(on vfs.FS, dir string) {
		asked++
		o := ExportOptions{Format: data.HuggingFace, Stale: func(dir string, _ bool) { t.Errorf("told of %s", dir) }}
		x := &exporter{ctx: t.Context(), from: from, fs: on, dir: dir, o: o}
		if err := x.stale(); err != nil {
			t.Error(err)
		}
	}
	top := t.TempDir()
	for dir, on := range map[string]vfs.FS{"/out": vfs.NewMem(), filepath.Join(top, "out"): vfs.Default} {
		if _, err := Export(t.Context(), from, on, dir, ExportOptions{Format: data.DCP, Progress: func(int64) { ask(on, dir) }}); err != nil {
			t.Error(err)
		}
	}
	// A lock of an open file keeps out those of processes, this one's too.
	lock := filepath.Join(top, "other.partial-x", ".lock")
	put(t, lock, "")
	held, err := os.OpenFile(lock, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := unix.FcntlFlock(held.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
	ask(vfs.Default, filepath.Join(top, "other"))
	if asked < 3 {
		t.Errorf("asked %d times", asked)
	}
}

// TestExportsToOneDirectory lets one export end while another is at work: the
// first is kept whole, and the second leaves nothing.
func TestExportsToOneDirectory(t *testing.T) {
	from := openForeign(t, nested(t).dir)
	dir := filepath.Join(t.TempDir(), "out")
	var first map[string]string
	_, err := Export(t.Context(), from, vfs.Default, dir, ExportOptions{Format: data.DCP, Progress: func(int64) {
		if first != nil {
			return
		}
		if _, err := Export(t.Context(), from, vfs.Default, dir, ExportOptions{Format: data.HuggingFace}); err != nil {
			t.Error(err)
		}
		first = tree(t, dir)
	}})
	var occupied *OccupiedError
	if !errors.As(err, &occupied) {
		t.Errorf("error %v, want an OccupiedError", err)
	}
	if now := tree(t, dir); len(first) < 2 || !maps.Equal(now, first) {
		t.Errorf("%d paths are there, want the %d of the first", len(now), len(first))
	}
	if beside, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(beside) != 1 {
		t.Errorf("%v are left: %v", beside, err)
	}
}

// TestExportReadOnly wants the cause and the next step once.
func TestExportReadOnly(t *testing.T) {
	from := openForeign(t, nested(t).dir)
	readOnly := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			return syscall.EROFS
		}
		return nil
	}))
	for _, dir := range []string{"/out", "/new/out"} {
		_, err := Export(t.Context(), from, readOnly, dir, ExportOptions{Format: data.DCP})
		if !errors.Is(err, syscall.EROFS) {
			t.Fatalf("error %v", err)
		}
		text := err.Error()
		if strings.Count(text, syscall.EROFS.Error()) != 1 || !strings.HasSuffix(text, "; choose a directory where you may write") {
			t.Error(text)
		}
	}
}

// manyValues is a checkpoint of large values that are made when they are read.
type manyValues struct {
	data.Reader
	m checkpoint.Manifest
}

func (r manyValues) ReadMetadata(context.Context) (checkpoint.Manifest, error) { return r.m, nil }
func (r manyValues) SetUp(context.Context, checkpoint.Manifest, bool) error    { return nil }
func (r manyValues) ReadData(_ context.Context, _ []checkpoint.Want, reads []checkpoint.Read, dst data.Destination) (int64, error) {
	for i := range reads {
		copy(dst.Want(i), reads[i].FQN)
	}
	return 0, nil
}

func TestExportHoldsOneValueAtATime(t *testing.T) {
	const each, n = 4 << 20, 24
	from := manyValues{m: openForeign(t, nested(t).dir).Manifest()}
	from.m.Layout = checkpoint.Layout{}
	for i := range n {
		from.m.Layout.Values = append(from.m.Layout.Values, checkpoint.Value{FQN: strings.Repeat("v", i+1), Bytes: each})
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, most := heap(), uint64(0)
	_, err := Export(t.Context(), from, vfs.Default, filepath.Join(t.TempDir(), "out"), ExportOptions{
		Format: data.DCP, Progress: func(int64) { most = max(most, heap()) },
	})
	if err != nil || most == 0 || most > before+8*each {
		t.Errorf("%d bytes were in use, %d before: %v", most, before, err)
	}
}
