package filesystem

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/object/s3test"
	"github.com/ckptstore/ckptstore/internal/store"
)

// inBucket serves a new store whose checkpoints are in a bucket. data is their directory on the
// server.
func inBucket(t *testing.T) (a *asker, h *Handler, data string) {
	t.Helper()
	server := s3test.Start(t, s3test.Options{})
	t.Setenv("AWS_ACCESS_KEY_ID", server.Key.Access)
	t.Setenv("AWS_SECRET_ACCESS_KEY", server.Key.Secret)
	t.Setenv("AWS_REGION", server.Region)
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := store.Init(t.Context(), dir, "s3://"+server.Bucket+"/files?endpoint="+server.Endpoint); err != nil {
		t.Fatal(err)
	}
	a, _, h = handledIn(t, dir, nil)
	return a, h, filepath.Join(server.Dir, "files", "data")
}

// freed waits until no file is in shared memory but rings of streams.
func freed(t *testing.T, h *Handler) {
	t.Helper()
	until(t, "the memory of files that were read is free", func() bool {
		for _, path := range inMemory(h) {
			if info, err := os.Stat(path); err == nil && info.Size() != ringBlocks*blockSize {
				return false
			}
		}
		return true
	})
}

// Files in a bucket are read as others: by a path, and verified.
func TestFilesInBucket(t *testing.T) {
	a, h, _ := inBucket(t)
	for _, dir := range []string{every, mesh} {
		url := "run/" + filepath.Base(dir)
		if err := a.save(url, dir); err != nil {
			t.Fatal(err)
		}
		want := files(t, dir)
		for name, data := range want {
			if len(data) == 0 && name != metadataFile {
				delete(want, name) // it has no named item
			}
		}
		if got, err := a.get(url); err != nil || !same(got, want) {
			t.Errorf("%s: other files came back: %v", dir, err)
		}
	}
	// An attachment has one digest.
	if err := a.put("run/every/extra.bin", counted(pieceSize+1)); err != nil {
		t.Fatal(err)
	}
	if got, err := a.content("run/every/extra.bin"); err != nil || !bytes.Equal(got, counted(pieceSize+1)) {
		t.Errorf("other bytes of an attachment: %v", err)
	}
	freed(t, h)
}

// Only the requested pieces and some after them are fetched, and damage is found in its piece.
func TestPiecesInBucket(t *testing.T) {
	a, h, dir := inBucket(t)
	whole := counted(20*pieceSize + 12345)
	if err := a.put("run/out/big.pt", whole); err != nil {
		t.Fatal(err)
	}
	lies, err := filepath.Glob(filepath.Join(dir, "run", "*", "*", "big.pt"))
	if err != nil || len(lies) != 1 {
		t.Fatal(lies, err)
	}
	f, err := os.OpenFile(lies[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	const damaged = 16*pieceSize + 7
	if _, err := f.WriteAt([]byte{whole[damaged] ^ 4}, damaged); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}

	var r openReply
	if err := a.ask("open", pathRequest{"run/out/big.pt"}, &r); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{pieceSize - 3, 0, 20 * pieceSize, r.Size - 5} {
		var reply verifyReply
		if err := a.ask("verify", verifyRequest{Read: r.Read, Offset: at, Length: 5, Sums: true}, &reply); err != nil {
			t.Fatal(err)
		}
		if reply.Runs != nil {
			t.Error("a client cannot verify bytes that are not fetched")
		}
		copied, err := os.ReadFile(r.Path)
		if err != nil || !bytes.Equal(copied[at:at+5], whole[at:at+5]) {
			t.Errorf("other bytes at %d: %v", at, err)
		}
	}
	if err := a.ask("verify", verifyRequest{Read: r.Read, Offset: 16 * pieceSize, Length: 1}, nil); err == nil || !strings.Contains(err.Error(), "checksum") {
		t.Errorf("a piece with a flipped bit: %v", err)
	}
	if copied, err := os.ReadFile(r.Path); err != nil || copied[damaged] != 0 {
		t.Errorf("a damaged byte was passed on: %d, %v", copied[damaged], err)
	}
	if err := a.ask("done", doneRequest{r.Read}, nil); err != nil {
		t.Fatal(err)
	}
	freed(t, h)
}
