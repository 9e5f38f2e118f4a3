package blobs

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"golang.org/x/sync/errgroup"
)

func noise(n int) []byte {
	data := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{}).Read(data)
	return data
}

// has checks that an error has texts.
func has(t *testing.T, err error, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("error %v, want %q in it", err, text)
		}
	}
}

func TestBlobs(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "blobs")
	blobs := In(dir)
	for _, size := range []int{0, 1, events.MaxInline, events.MaxInline + 1, 3 << 20} {
		data := noise(size)
		blob, err := blobs.Put(t.Context(), data)
		if err != nil {
			t.Fatal(err)
		}
		inline := size <= events.MaxInline
		if blob.Size != int64(size) || (blob.Digest == "") != inline || bytes.Equal(blob.Inline, data) != inline {
			t.Errorf("%d bytes: digest %q, size %d, %d inline", size, blob.Digest, blob.Size, len(blob.Inline))
		}
		if got, err := blobs.Get(t.Context(), blob); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes come back as %d, %v", size, len(got), err)
		}
		if !inline {
			path := filepath.Join(dir, blob.Digest[:2], blob.Digest)
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s holds something else: %v", path, err)
			}
		}
	}
}

func TestDamagedBlobs(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "blobs")
	blobs := In(dir)
	data := noise(events.MaxInline + 100)
	blob, err := blobs.Put(t.Context(), data)
	if err != nil {
		t.Fatal(err)
	}
	path := blobs.Path(blob.Digest)
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	flipped := bytes.Clone(data)
	flipped[99] ^= 4
	for name, c := range map[string]struct {
		file string
		says string
	}{
		"a flipped bit": {string(flipped), "corrupt"},
		"truncated":     {string(data[:len(data)-1]), "corrupt"},
		"longer":        {string(data) + "x", "corrupt"},
		"empty":         {"", "corrupt"},
	} {
		write(c.file)
		if got, err := blobs.Get(t.Context(), blob); err == nil {
			t.Errorf("%s: %d bytes", name, len(got))
		} else {
			has(t, err, path, c.says, "backup")
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	_, err = blobs.Get(t.Context(), blob)
	if has(t, err, path, "backup"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v, want %v", err, os.ErrNotExist)
	}
	// Put overwrites any file of that name.
	write("garbage")
	if _, err := blobs.Put(t.Context(), data); err != nil {
		t.Fatal(err)
	}
	if got, err := blobs.Get(t.Context(), blob); err != nil || !bytes.Equal(got, data) {
		t.Errorf("after a repair: %d bytes, %v", len(got), err)
	}
	for _, digest := range []string{"x", "../../../etc/passwd", strings.Repeat("zz", 32), strings.Repeat("/", 64)} {
		if _, err := blobs.Get(t.Context(), events.Blob{Digest: digest, Size: 1}); err == nil {
			t.Errorf("digest %q: no error", digest)
		}
	}
	blob.Size++
	_, err = blobs.Get(t.Context(), blob)
	has(t, err, "corrupt")
}

func TestConcurrentBlobs(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "blobs")
	first, second := In(dir), In(dir)
	data := noise(events.MaxInline + 1)
	var g errgroup.Group
	for i := range 8 {
		g.Go(func() error {
			b := first
			if i%2 == 1 {
				b = second
			}
			blob, err := b.Put(t.Context(), data)
			if err == nil {
				_, err = b.Get(t.Context(), blob)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if files, err := os.ReadDir(filepath.Dir(first.Path(checkpoint.Sum(data).String()))); err != nil || len(files) != 1 {
		t.Errorf("files %v, %v", files, err)
	}
}
