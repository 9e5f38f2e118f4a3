package foreign

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestCompare: an export in every format and cut is that of its checkpoint, and each kind of
// change to each of its files is found and named.
func TestCompare(t *testing.T) {
	t.Parallel()
	exports := 0
	for name, f := range fixtures(t) {
		from := openForeign(t, f.dir)
		for format, limits := range map[data.Format][]int64{data.DCP: {0}, data.SafeTensors: {0}, data.HuggingFace: {0, 1, 100, 300}} {
			for _, limit := range limits {
				dir := filepath.Join(t.TempDir(), "out")
				_, err := Export(t.Context(), from, vfs.Default, dir, ExportOptions{Format: format, MaxShard: limit})
				if unfit := (*UnfitError)(nil); errors.As(err, &unfit) {
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				list, found, err := Compare(t.Context(), from, vfs.Default, dir, CompareOptions{})
				if err != nil || found != format {
					t.Errorf("%s as %s, at most %d: %q, %v", name, format, limit, found, err)
					continue
				}
				exports++
				names, err := os.ReadDir(dir)
				if err != nil || len(names) != len(list) {
					t.Errorf("%s as %s: %d files of %d: %v", name, format, len(list), len(names), err)
				}
				for _, h := range list {
					bytes, err := os.ReadFile(filepath.Join(dir, h.Name))
					if err != nil || h.SHA256 != sha256.Sum256(bytes) || h.Bytes != int64(len(bytes)) || h.Also {
						t.Errorf("%s as %s: %s: %+v, %v", name, format, h.Name, h, err)
					}
					changeFile(t, from, dir, h.Name, bytes)
				}
			}
		}
	}
	if exports < 15 {
		t.Errorf("%d exports were compared", exports)
	}
}

// changeFile changes a file of an export in several ways and expects each to be found.
func changeFile(t *testing.T, from data.Reader, dir, name string, whole []byte) {
	t.Helper()
	path := filepath.Join(dir, name)
	flipped := func(at int) []byte {
		out := bytes.Clone(whole)
		out[at] ^= 1
		return out
	}
	for what, content := range map[string][]byte{
		"first byte": flipped(0), "byte in the middle": flipped(len(whole) / 2), "last byte": flipped(len(whole) - 1),
		"cut": whole[:len(whole)-1], "longer": append(bytes.Clone(whole), 0), "empty": {},
	} {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, err := Compare(t.Context(), from, vfs.Default, dir, CompareOptions{})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s of %s: %v", what, path, err)
		}
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestCompareNames: a directory with more, with fewer or with other files than the export is
// refused, unless the caller names them.
func TestCompareNames(t *testing.T) {
	t.Parallel()
	var from *data.Foreign
	for _, f := range fixtures(t) {
		from = openForeign(t, f.dir)
		break
	}
	dir := filepath.Join(t.TempDir(), "out")
	if _, err := Export(t.Context(), from, vfs.Default, dir, ExportOptions{Format: data.DCP}); err != nil {
		t.Fatal(err)
	}
	refused := func(file, why string, also ...string) {
		t.Helper()
		_, _, err := Compare(t.Context(), from, vfs.Default, dir, CompareOptions{Also: also})
		if differs := (*DiffersError)(nil); !errors.As(err, &differs) || differs.File != file || !strings.Contains(differs.Problem, why) {
			t.Errorf("want %s: %s, got %v", file, why, err)
		}
	}
	do := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	extra := filepath.Join(dir, "config.json")
	refused("config.json", "it is missing", "config.json")
	do(os.WriteFile(extra, []byte("{}"), 0o600))
	refused("config.json", "not a file of the checkpoint")
	list, _, err := Compare(t.Context(), from, vfs.Default, dir, CompareOptions{Also: []string{"config.json"}})
	if err != nil || !slices.ContainsFunc(list, func(h Hashed) bool {
		return h.Also && h.Name == "config.json" && h.SHA256 == sha256.Sum256([]byte("{}"))
	}) {
		t.Errorf("%+v, %v", list, err)
	}
	do(os.Remove(extra), os.Mkdir(extra, 0o700))
	refused("config.json", "not a regular file", "config.json")
	do(os.Remove(extra))
	data := filepath.Join(dir, "__0_0.distcp")
	moved := filepath.Join(filepath.Dir(dir), "moved")
	do(os.Rename(data, moved))
	refused("__0_0.distcp", "it is missing")
	do(os.Symlink(moved, data))
	refused("__0_0.distcp", "not a regular file")
	do(os.Remove(data), os.Rename(moved, data))
	if _, _, err := Compare(t.Context(), from, vfs.Default, t.TempDir(), CompareOptions{}); err == nil || !strings.Contains(err.Error(), "ckptstore export --format") {
		t.Errorf("an empty directory: %v", err)
	}
}
