package staging

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// Bytes are found by their digest in sealed slots of the store only.
func TestSealedChunks(t *testing.T) {
	shared := t.TempDir()
	data, h, p := slotOf(t)
	want := bytes.Repeat([]byte{9}, 100)
	copy(data[p.offsets[0]:], want)
	storeSealed(data, h.Generation)
	open := bytes.Clone(data)
	storeSealed(open, h.Generation-1)
	copy(open[p.offsets[1]:], "7 bytes")
	for name, text := range map[string][]byte{
		filepath.Join("ckptstore-"+storeName(storeA)+"-run-n0", "r00003.save.1"): data,
		filepath.Join("ckptstore-"+storeName(storeA)+"-run-n0", "r00004.save.2"): open,
		filepath.Join("ckptstore-"+storeName(storeA)+"-run-n0", "r00005.save.3"): []byte("no slot"),
		filepath.Join("ckptstore-"+storeName(storeA)+"-run-n0", "r00006.save.4"): nil,
		filepath.Join("ckptstore-000000000000-run-n0", "r00003.save.1"):          bytes.Replace(data, want, bytes.Repeat([]byte{8}, 100), 1),
	} {
		path := filepath.Join(shared, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := OpenSealedChunks(shared, storeA)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	value := checkpoint.Item{Value: true, Bytes: 100}
	got, from, err := s.Chunk(t.Context(), value, checkpoint.Sum(want))
	if err != nil || !bytes.Equal(got, want) || filepath.Base(from) != "r00003.save.1" {
		t.Errorf("%d bytes from %s: %v", len(got), from, err)
	}
	like := checkpoint.Item{Bytes: 100, Shard: tensor.Shard{DType: tensor.Uint8}}
	for name, c := range map[string]struct {
		like checkpoint.Item
		of   []byte
	}{
		"another digest": {value, want[1:]}, "a tensor": {like, want}, "another size": {checkpoint.Item{Value: true, Bytes: 99}, want},
		"of a slot that is not sealed": {checkpoint.Item{Value: true, Bytes: 7}, []byte("7 bytes")},
		"of another store":             {value, bytes.Repeat([]byte{8}, 100)},
	} {
		if got, from, err := s.Chunk(t.Context(), c.like, checkpoint.Sum(c.of)); got != nil || err != nil {
			t.Errorf("%s: found in %s, %v", name, from, err)
		}
	}
}
