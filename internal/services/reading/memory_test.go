package reading

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/tensor"
)

// rowsOf asks for the first rows of a tensor of [safetensors] as another type, so
// that they go through memory. The bytes stay the same.
func rowsOf(fqn string, rows, of int64) Request {
	return Request{Ref: "a", Items: []client.Item{{
		FQN: fqn, DType: tensor.Int8, Shape: []int64{of, 1024}, Offsets: []int64{0, 0}, Sizes: []int64{rows, 1024},
	}}}
}

// TestDoneIsKeptForAWhile checks that released memory is reused, and freed when
// it is not needed.
func TestDoneIsKeptForAWhile(t *testing.T) {
	s := serve(t, safetensors(t, 100))
	s.server.memory.idle.Rest = time.Hour
	first := ask[Reply](s, "read", rowsOf("t0", 100, 100), http.StatusOK)
	second := ask[Reply](s, "read", rowsOf("t0", 10, 100), http.StatusOK)
	if first.Arenas[0].Path == second.Arenas[0].Path {
		t.Fatal("two reads that are not done have one file")
	}
	if info, err := os.Stat(first.Arenas[0].Path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if info, err := os.Stat(filepath.Dir(first.Arenas[0].Path)); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info, err)
	}
	ask[struct{}](s, "done", Done{first.Read}, http.StatusOK)
	s.refused("done", Done{first.Read}, http.StatusBadRequest)
	third := ask[Reply](s, "read", rowsOf("t0", 50, 100), http.StatusOK)
	if third.Arenas[0].Path != first.Arenas[0].Path {
		t.Error("memory that was given back is not used again")
	}
	if got := s.bytesOf(third, 0); !bytes.Equal(got, pattern(0, 50*1024)) {
		t.Error("what is read into it is another")
	}
	s.server.memory.idle.Rest = time.Millisecond
	for _, r := range []Reply{second, third} {
		ask[struct{}](s, "done", Done{r.Read}, http.StatusOK)
	}
	until(t, "the memory is not freed", func() bool { return len(s.files()) == 0 })
}

// TestFull checks that a read without room is refused with the needed and the
// free size, after kept memory was freed.
func TestFull(t *testing.T) {
	s := serve(t, safetensors(t, 100))
	r := ask[Reply](s, "read", rowsOf("t0", 20, 100), http.StatusOK)
	s.server.memory.room = func(*os.File) (int64, error) {
		n := int64(64 << 10)
		for _, path := range s.files() {
			if info, err := os.Stat(path); err == nil {
				n -= info.Size()
			}
		}
		return n, nil
	}
	text := s.refused("read", rowsOf("t0", 60, 100), http.StatusInsufficientStorage)
	for _, part := range []string{"61440 bytes", "45056 are free", "in parts"} {
		if !strings.Contains(text, part) {
			t.Errorf("%q lacks %q", text, part)
		}
	}
	ask[struct{}](s, "done", Done{r.Read}, http.StatusOK)
	// A larger file is taken first, so that the idle one stands in the way.
	held := ask[Reply](s, "read", rowsOf("t0", 1, 100), http.StatusOK)
	again := ask[Reply](s, "read", rowsOf("t0", 30, 100), http.StatusOK)
	ask[struct{}](s, "done", Done{held.Read}, http.StatusOK)
	ask[struct{}](s, "done", Done{again.Read}, http.StatusOK)
	if full := ask[Reply](s, "read", rowsOf("t0", 60, 100), http.StatusOK); !bytes.Equal(s.bytesOf(full, 0), pattern(0, 60*1024)) {
		t.Error("what was read is another")
	}
}

// TestCallerIsKilled checks that the reads of a killed process are freed.
func TestCallerIsKilled(t *testing.T) {
	s := serve(t, safetensors(t, 100))
	s.server.memory.idle.Rest = time.Millisecond
	body, err := json.Marshal(rowsOf("t0", 100, 100))
	if err != nil {
		t.Fatal(err)
	}
	args, err := json.Marshal([]string{s.socket, string(body)})
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), callerEnv+"="+string(args))
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var r Reply
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		t.Fatal(line, err)
	}
	if got := s.bytesOf(r, 0); !bytes.Equal(got, pattern(0, 100*1024)) || s.server.Busy() == "" {
		t.Fatal("the caller has no read")
	}
	mine := ask[Reply](s, "read", rowsOf("t0", 1, 100), http.StatusOK)
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	until(t, "the memory of the killed caller is not freed", func() bool {
		_, err := os.Stat(r.Arenas[0].Path)
		return errors.Is(err, fs.ErrNotExist)
	})
	if got := s.bytesOf(mine, 0); !bytes.Equal(got, pattern(0, 1024)) {
		t.Error("another process's read is gone too")
	}
	s.refused("done", Done{r.Read}, http.StatusBadRequest)
}

// TestLeftovers checks that the memory of a killed server is freed, and that of a
// live server is not.
func TestLeftovers(t *testing.T) {
	s := serve(t, safetensors(t, 1))
	dead := filepath.Join(s.shared, fmt.Sprintf("ckptstore-memory-%d", os.Geteuid()), "ckptstore-reads-1-n0")
	if err := errors.Join(os.MkdirAll(dead, 0o700), os.WriteFile(filepath.Join(dead, "1"), make([]byte, 10), 0o600), os.WriteFile(filepath.Join(dead, "lock"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	alive, err := shm.Own(s.shared, "ckptstore-reads-2-n0", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = alive.Remove(); _ = alive.Close() }()
	ask[Reply](s, "read", rowsOf("t0", 1, 1), http.StatusOK)
	if _, err := os.Stat(dead); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was left is there: %v", err)
	}
	if _, err := os.Stat(alive.Path()); err != nil {
		t.Errorf("what another server has is gone: %v", err)
	}
	// So does `gc --staging --all-stores`.
	if err := os.Mkdir(dead, 0o700); err != nil {
		t.Fatal(err)
	}
	freed, _, err := staging.FreeAll(s.shared)
	if err != nil || len(freed) != 1 || freed[0] != dead {
		t.Errorf("freed %q, %v", freed, err)
	}
}

// TestRemovedFromOutside checks that a read gets other memory after another
// process removed its directory.
func TestRemovedFromOutside(t *testing.T) {
	m := newMemory(t.TempDir(), slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
	})
	for range 2 {
		f, err := m.take(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(f.file.Name()); err != nil {
			t.Fatalf("a caller could not open it: %v", err)
		}
		if err := os.RemoveAll(filepath.Dir(f.file.Name())); err != nil {
			t.Fatal(err)
		}
		m.give(f)
	}
}

// TestManyServersStart makes directories concurrently, which other servers take
// for leftovers until they are locked.
func TestManyServersStart(t *testing.T) {
	shared := t.TempDir()
	var all sync.WaitGroup
	for range 32 {
		all.Go(func() {
			m := newMemory(shared, slog.New(slog.DiscardHandler))
			f, err := m.take(t.Context(), 1)
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := os.Stat(f.file.Name()); err != nil {
				t.Error(err)
			}
			m.give(f)
			if err := m.close(); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if left, err := filepath.Glob(filepath.Join(shared, "*", "*")); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// TestCloseUnderReads closes the server during requests.
func TestCloseUnderReads(t *testing.T) {
	s := serve(t, safetensors(t, 100))
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for {
				r, err := s.server.onRead(t.Context(), rowsOf("t0", 100, 100))
				if err != nil {
					if !strings.Contains(err.Error(), "the server has ended") && !errors.Is(err, fs.ErrNotExist) {
						t.Error(err)
					}
					return
				}
				if _, err := s.server.onDone(t.Context(), Done{r.Read}); err != nil && s.server.Busy() != "" {
					t.Error(err)
				}
			}
		})
	}
	ask[Reply](s, "read", rowsOf("t0", 100, 100), http.StatusOK)
	if err := s.server.Close(); err != nil {
		t.Fatal(err)
	}
	all.Wait()
}
