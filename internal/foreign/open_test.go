package foreign

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestForeignRefuses spoils a directory in each way that is not the codecs'
// matter.
func TestForeignRefuses(t *testing.T) {
	put := func(t *testing.T, name, text string) {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		format data.Format
		spoil  func(t *testing.T, dir string)
		want   string
	}{
		"no metadata":        {data.DCP, func(_ *testing.T, dir string) { _ = os.Remove(filepath.Join(dir, ".metadata")) }, "the save that wrote them did not end"},
		"empty metadata":     {data.DCP, func(t *testing.T, dir string) { put(t, filepath.Join(dir, ".metadata"), "") }, ".metadata"},
		"data file is gone":  {data.DCP, func(_ *testing.T, dir string) { _ = os.Remove(filepath.Join(dir, "__0_0.distcp")) }, `__0_0.distcp is damaged: the file is not there, and the checkpoint has parts in it of "`},
		"data file is cut":   {data.DCP, func(_ *testing.T, dir string) { _ = os.Truncate(filepath.Join(dir, "__0_0.distcp"), 3000) }, "do not lie in the 3000 bytes of the file"},
		"data file is empty": {data.DCP, func(_ *testing.T, dir string) { _ = os.Truncate(filepath.Join(dir, "__0_0.distcp"), 0) }, "cut off"},
		"data file is zeros": {data.DCP, func(t *testing.T, dir string) {
			put(t, filepath.Join(dir, "__0_0.distcp"), strings.Repeat("\x00", 1<<16))
		}, "__0_0.distcp"},
		"data file is a folder": {data.DCP, func(_ *testing.T, dir string) {
			_ = os.Remove(filepath.Join(dir, "__0_0.distcp"))
			_ = os.Mkdir(filepath.Join(dir, "__0_0.distcp"), 0o700)
		}, "is a directory"},
		"index is empty": {data.HuggingFace, func(t *testing.T, dir string) { put(t, filepath.Join(dir, safetensors.IndexFile), "") }, safetensors.IndexFile},
		"index names no file": {data.HuggingFace, func(t *testing.T, dir string) {
			put(t, filepath.Join(dir, safetensors.IndexFile), `{"weight_map": {"model.scalar": "x.safetensors"}}`)
		}, "x.safetensors"},
		"index misses a tensor": {data.HuggingFace, func(t *testing.T, dir string) {
			put(t, filepath.Join(dir, safetensors.IndexFile), `{"weight_map": {"no.such": "`+safetensors.ShardFile(1, 1)+`"}}`)
		}, "places it in"},
		"shard is cut":        {data.HuggingFace, func(_ *testing.T, dir string) { _ = os.Truncate(filepath.Join(dir, safetensors.ShardFile(1, 1)), 4100) }, "bytes of data"},
		"shard is gone":       {data.HuggingFace, func(_ *testing.T, dir string) { _ = os.Remove(filepath.Join(dir, safetensors.ShardFile(1, 1))) }, safetensors.ShardFile(1, 1) + " is damaged: the file is not there"},
		"several files":       {data.SafeTensors, func(t *testing.T, dir string) { put(t, filepath.Join(dir, "b.safetensors"), "") }, "name one of the files"},
		"nothing":             {data.SafeTensors, func(_ *testing.T, dir string) { _ = os.Remove(filepath.Join(dir, safetensors.SingleFile)) }, "holds neither"},
		"checkpoint of ours":  {data.SafeTensors, func(t *testing.T, dir string) { put(t, filepath.Join(dir, checkpoint.ReceiptFile), "{}") }, "name it by RUN@ID"},
		"the whole directory": {data.SafeTensors, func(_ *testing.T, dir string) { _ = os.RemoveAll(dir) }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "d")
			if _, err := Export(t.Context(), openForeign(t, nested(t).dir), vfs.Default, dir, ExportOptions{Format: c.format}); err != nil {
				t.Fatal(err)
			}
			openForeign(t, dir)
			c.spoil(t, dir)
			_, err := Open(t.Context(), vfs.Default, dir)
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), dir) {
				t.Errorf("error %v, want %q in it", err, c.want)
			}
			if gone := strings.Contains(name, "no metadata") || name == "nothing" || name == "the whole directory"; gone != errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%v: is it fs.ErrNotExist? want %v", err, gone)
			}
		})
	}
	if _, err := Open(t.Context(), vfs.Default, "relative"); err == nil {
		t.Error("a relative path is taken")
	}
}
