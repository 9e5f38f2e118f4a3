package foreign

import (
	"archive/zip"
	"bytes"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// copied is a directory of PyTorch that a test may spoil.
func copied(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "saved")
	if err := os.CopyFS(dir, os.DirFS(nested(t).dir)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// places are the chunks and values of rank 0.
func places(t *testing.T, dir string) []data.Place {
	t.Helper()
	b, _, err := survey(t.Context(), vfs.Default, dir)
	if err != nil {
		t.Fatal(err)
	}
	return b.parts[0].Chunks
}

// flipped is a directory of PyTorch in which one bit of an item is wrong.
func flipped(t *testing.T, value bool) (dir string, of data.Place) {
	t.Helper()
	dir = copied(t)
	for _, e := range places(t, dir) {
		if e.Item.Value == value && e.Item.Bytes > 0 {
			of = e
			break
		}
	}
	at := of.Offset + of.Item.Bytes/2
	if value {
		at = of.Offset + 66 // in its first record, behind the header
	}
	rewrite(t, filepath.Join(dir, "__0_0.distcp"), func(b []byte) []byte { b[at] ^= 4; return b })
	return dir, of
}

func TestCopiesFindFlips(t *testing.T) {
	for name, value := range map[string]bool{"tensor": false, "value": true} {
		t.Run(name, func(t *testing.T) {
			dir, of := flipped(t, value)
			damaged := func(what string, err error) {
				t.Helper()
				var corrupt *data.CorruptError
				if !errors.As(err, &corrupt) || corrupt.FQN != of.Item.Shard.FQN || !strings.HasSuffix(corrupt.File, "__0_0.distcp") {
					t.Errorf("%s: %v, want a storage.CorruptError of %q", what, err, of.Item.Shard.FQN)
				}
			}
			f := openForeign(t, dir)
			_, err := data.NewCopySource(t.Context(), f, 0, []checkpoint.Item{of.Item}, nil).Item(0)
			damaged("copy", err)
			out := filepath.Join(t.TempDir(), "out")
			_, err = Export(t.Context(), openForeign(t, dir), vfs.Default, out, ExportOptions{Format: data.DCP})
			damaged("export", err)
			if _, err := os.Stat(out); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the export is there: %v", err)
			}
			from := nested(t)
			from.dir = dir
			_, err = adopt(t, from).read(t)
			damaged("adopted", err)
		})
	}
}

// TestWindowsFindFlips reads a chunk in parts: the last read of it fails, of
// each pass.
func TestWindowsFindFlips(t *testing.T) {
	const rows = 3 * checkpoint.BlockSize / 4
	dir := t.TempDir()
	writeDCP(t, dir, tensor.Float32, []int64{rows}, func(_ string, b []byte) []byte { return b })
	rewrite(t, filepath.Join(dir, "__0_0.distcp"), func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
	f := openForeign(t, dir)
	full := tensor.Shape{rows}.Full()
	for pass := range 2 {
		for _, n := range []int64{2, 0, 1} {
			part := tensor.Box{Offsets: []int64{n * rows / 3}, Sizes: []int64{rows / 3}}
			want := checkpoint.Want{Shard: tensor.Shard{FQN: "t", DType: tensor.Float32, Global: tensor.Shape{rows}, Box: part}}
			_, err := f.ReadData(t.Context(), []checkpoint.Want{want}, []checkpoint.Read{{FQN: "t", Chunk: full, Region: part}}, make(buffer, checkpoint.BlockSize))
			if corrupt := (*data.CorruptError)(nil); errors.As(err, &corrupt) != (n == 1) {
				t.Errorf("pass %d, part %d: %v", pass, n, err)
			}
		}
	}
}

// writeDCP makes a directory with one tensor of one chunk, "t", whose archive
// is changed record by record.
func writeDCP(t *testing.T, dir string, dtype tensor.DType, sizes []int64, change func(record string, b []byte) []byte) {
	t.Helper()
	frame, err := dcp.TensorArchive(dtype, sizes)
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, tensor.Shape(sizes).Volume()*int64(dtype.Size()))
	made := slices.Concat(frame.Prefix, data, frame.Suffix(crc32.ChecksumIEEE(data)))
	in, err := zip.NewReader(bytes.NewReader(made), int64(len(made)))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for _, f := range in.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		to, err2 := w.CreateHeader(&zip.FileHeader{Name: f.Name, Method: zip.Store})
		if err = errors.Join(err, err2); err == nil {
			_, err = to.Write(change(strings.TrimPrefix(f.Name, "archive/"), b))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	saveDCP(t, dir, dtype, sizes, out.Bytes())
}

func saveDCP(t *testing.T, dir string, dtype tensor.DType, shape []int64, archive []byte) {
	t.Helper()
	text, err := dcp.WriteMetadata(dcp.Metadata{Tensors: []dcp.Tensor{{
		FQN: "t", DType: dtype, Shape: shape,
		Chunks: []dcp.Chunk{{Box: tensor.Shape(shape).Full(), Where: dcp.Location{File: "__0_0.distcp", Length: int64(len(archive))}}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		os.WriteFile(filepath.Join(dir, dcp.MetadataFile), text, 0o600),
		os.WriteFile(filepath.Join(dir, "__0_0.distcp"), archive, 0o600),
	); err != nil {
		t.Fatal(err)
	}
}

// TestBigEndianDirectory: elements of one byte have no order.
func TestBigEndianDirectory(t *testing.T) {
	for dtype, want := range map[tensor.DType]string{tensor.Uint8: "", tensor.BFloat16: "big-endian machine"} {
		dir := t.TempDir()
		writeDCP(t, dir, dtype, []int64{3}, func(name string, b []byte) []byte {
			if name == "byteorder" {
				return []byte("big")
			}
			return b
		})
		_, err := Open(t.Context(), vfs.Default, dir)
		if got := err != nil; got != (want != "") || got && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", dtype, err)
		}
	}
}

// TestExpandedTensor gives one element the strides of many.
func TestExpandedTensor(t *testing.T) {
	for n, ok := range map[uint32]bool{1 << 28: true, 1<<28 + 1: false} {
		dir := t.TempDir()
		var archive []byte
		writeDCP(t, dir, tensor.Float32, []int64{1}, func(name string, b []byte) []byte {
			if name != "data.pkl" {
				return b
			}
			one := []byte("K\x01\x85")
			if bytes.Count(b, one) != 2 {
				t.Fatalf("the pickle is %q", b)
			}
			b = bytes.Replace(b, one, []byte{'J', byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24), 0x85}, 1)
			return bytes.Replace(b, one, []byte("K\x00\x85"), 1)
		})
		archive, err := os.ReadFile(filepath.Join(dir, "__0_0.distcp"))
		if err != nil {
			t.Fatal(err)
		}
		saveDCP(t, dir, tensor.Float32, []int64{int64(n)}, archive)
		_, err = Open(t.Context(), vfs.Default, dir)
		if (err == nil) != ok || !ok && !strings.Contains(err.Error(), "each element many times") {
			t.Errorf("%d elements in 4 bytes: %v", n, err)
		}
	}
}

// TestPipesAreNotOpened: that would wait for a writer.
func TestPipesAreNotOpened(t *testing.T) {
	for _, name := range []string{dcp.MetadataFile, "__0_0.distcp", safetensors.SingleFile, safetensors.IndexFile} {
		dir := copied(t)
		if strings.Contains(name, "safetensors") {
			dir = t.TempDir()
		}
		full := filepath.Join(dir, name)
		if err := os.Remove(full); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if err := syscall.Mkfifo(full, 0o600); err != nil {
			t.Fatal(err)
		}
		said := make(chan error, 1)
		go func() { _, err := Open(t.Context(), vfs.Default, dir); said <- err }()
		select {
		case err := <-said:
			if err == nil || !strings.Contains(err.Error(), "not a regular file") {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: still waiting", name)
		}
	}
}
