package filesystem

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/peer"
	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// counted returns bytes without two equal groups of eight.
func counted(size int) []byte {
	b := make([]byte, size+8)
	for i := 0; i < size; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], uint64(i)*0x9e3779b97f4a7c15)
	}
	return b[:size]
}

// until polls for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for tick, end := time.Tick(5*time.Millisecond), time.Now().Add(limit); !ok(); <-tick {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// blocksFree limits shared memory to little more than so many blocks.
func blocksFree(blocks int64) func(*Handler) {
	return func(h *Handler) {
		h.memory.room = func(*os.File) (int64, error) {
			free := blocks*blockSize + blockSize/2
			for _, path := range inMemory(h) {
				var st syscall.Stat_t
				if syscall.Stat(path, &st) == nil {
					free -= st.Blocks * 512
				}
			}
			return free, nil
		}
	}
}

// inMemory returns the files of rings.
func inMemory(h *Handler) []string {
	paths, _ := filepath.Glob(filepath.Join(h.memory.files.Shared, "*", "ckptstore-writes-*-n0", "[0-9]*"))
	return paths
}

// A file of several rounds of its memory is read back unchanged, with much memory
// or one block.
func TestLargerThanItsMemory(t *testing.T) {
	for _, blocks := range []int64{1, 2, 100} {
		a, _, h := handled(t, blocksFree(blocks))
		h.memory.idle.Rest = time.Hour // longer than the test
		if err := a.save("run/step-1", every); err != nil {
			t.Fatal(err)
		}
		rounds := 2*int(min(blocks, ringBlocks)) + 1
		for _, size := range []int{0, 1, blockSize, rounds*blockSize + 12345} {
			want := counted(size)
			if err := a.put("run/step-1/extra", want); err != nil {
				t.Fatalf("%d blocks, %d bytes: %v", blocks, size, err)
			}
			got, err := a.get("run/step-1")
			if err != nil || !bytes.Equal(got["extra"], want) {
				t.Errorf("%d blocks, %d bytes: %d others came back, %v", blocks, size, len(got["extra"]), err)
			}
		}
		if n := len(inMemory(h)); n != 1 {
			t.Errorf("%d blocks: streams after each other had %d files in memory", blocks, n)
		}
	}
}

// A client that has filled all blocks gets its reply when one of them is done.
func TestWaitsForABlock(t *testing.T) {
	r := &ring{data: make([]byte, 2*blockSize)}
	r.begin(2)
	data, done := r.run(blockSize, blockSize)
	if len(data) != blockSize || cap(data) != blockSize {
		t.Errorf("%d bytes of %d", len(data), cap(data))
	}
	if err := r.wait(t.Context(), 2*blockSize); err != nil {
		t.Error(err) // the first block is empty
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.wait(over, 3*blockSize); !errors.Is(err, context.Canceled) {
		t.Errorf("the second block is given away: %v", err)
	}
	waits := make(chan error, 1)
	go func() { waits <- r.wait(t.Context(), 3*blockSize) }()
	done()
	if err := <-waits; err != nil {
		t.Error(err)
	}
}

// The memory of a closed stream is reused, and freed if it is not needed. Memory
// of a stream that ended otherwise is not reused: its client may continue to
// write there.
func TestWhoseMemory(t *testing.T) {
	a, _, h := handled(t, func(h *Handler) { h.memory.idle.Rest = time.Hour })
	var first, second, third createReply
	if err := a.ask("create", createRequest{"run/x/a.distcp"}, &first); err != nil {
		t.Fatal(err)
	}
	if err := a.ask("close", closeRequest{writeRequest{Stream: first.Stream}, 0}, nil); err != nil {
		t.Fatal(err)
	}
	if err := a.ask("create", createRequest{"run/x/b.distcp"}, &second); err != nil {
		t.Fatal(err)
	}
	if first.Memory != second.Memory {
		t.Error("memory that was touched is not used again")
	}
	// Another client creates the file again, and the former one does not know.
	if err := a.ask("create", createRequest{"run/x/b.distcp"}, &third); err != nil {
		t.Fatal(err)
	}
	if third.Memory == second.Memory {
		t.Fatal("two streams have the same memory")
	}
	if err := a.ask("close", closeRequest{writeRequest{Stream: second.Stream}, 0}, nil); err == nil {
		t.Error("a replaced file is closed")
	}
	if _, err := os.Stat(second.Memory); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("memory is kept that a client may write to: %v", err)
	}
	h.memory.idle.Rest = time.Millisecond
	if err := a.ask("close", closeRequest{writeRequest{Stream: third.Stream}, 0}, nil); err != nil {
		t.Fatal(err)
	}
	until(t, "the memory is not freed", func() bool { return len(inMemory(h)) == 0 })
}

// Without free memory, a stream is refused before anything is written.
func TestNoMemory(t *testing.T) {
	a, _, h := handled(t, blocksFree(3))
	var one, two, none createReply
	if err := a.ask("create", createRequest{"run/x/a.distcp"}, &one); err != nil || one.Blocks != 3 {
		t.Fatalf("%+v, %v", one, err)
	}
	err := a.ask("create", createRequest{"run/x/b.distcp"}, &none)
	if r := (*refusal)(nil); !errors.As(err, &r) || r.status != http.StatusInsufficientStorage || !strings.Contains(r.text, "shared memory") || !strings.Contains(r.text, "make room") {
		t.Errorf("without memory: %v", err)
	}
	if len(inMemory(h)) != 1 {
		t.Errorf("the refused stream has left %v", inMemory(h))
	}
	if err := a.ask("discard", discardRequest{one.Stream}, nil); err != nil {
		t.Fatal(err)
	}
	if err := a.ask("create", createRequest{"run/x/b.distcp"}, &two); err != nil || two.Blocks != 3 {
		t.Errorf("%+v, %v", two, err)
	}
}

// Many streams have fewer blocks each.
func TestAllMemory(t *testing.T) {
	m := newMemory(t.TempDir(), slog.New(slog.DiscardHandler))
	m.room = func(*os.File) (int64, error) { return 1 << 40, nil }
	total := 0
	for n := range 3 * allBlocks / ringBlocks {
		r, err := m.take()
		if err != nil {
			t.Fatal(err)
		}
		if want := max(1, min(ringBlocks, allBlocks-total)); r.blocks != want {
			t.Errorf("stream %d has %d blocks, want %d", n, r.blocks, want)
		}
		total += r.blocks
	}
	for r := range m.busy {
		m.lose(r)
	}
	if err := m.close(); err != nil {
		t.Error(err)
	}
	if _, err := m.take(); err == nil {
		t.Error("memory after the end")
	}
}

// The shared memory of a killed server is freed by the next one.
func TestMemoryOfAKilledServer(t *testing.T) {
	shared := t.TempDir()
	dead := filepath.Join(shared, fmt.Sprintf("ckptstore-memory-%d", os.Geteuid()), "ckptstore-writes-1-n0")
	if err := errors.Join(os.MkdirAll(dead, 0o700), os.WriteFile(filepath.Join(dead, "1"), make([]byte, 10), 0o600), os.WriteFile(filepath.Join(dead, "lock"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	alive, err := shm.Own(shared, "ckptstore-writes-2-n0", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = alive.Remove(); _ = alive.Close() }()
	m := newMemory(shared, slog.New(slog.DiscardHandler))
	r, err := m.take()
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{dead: fs.ErrNotExist, alive.Path(): nil, r.file.Name(): nil} {
		if _, err := os.Stat(path); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
	m.lose(r)
	if err := m.close(); err != nil {
		t.Error(err)
	}
	if left, err := filepath.Glob(filepath.Join(shared, "*", "*")); err != nil || len(left) != 1 {
		t.Errorf("left %v, %v", left, err)
	}
}

// beginFile writes half of a block, reports the memory of the block, and waits.
func beginFile(path, at string) int {
	a := newAsker(nil, at)
	var made createReply
	err := a.ask("create", createRequest{path}, &made)
	if err == nil {
		err = made.fill(0, counted(blockSize))
	}
	if err == nil {
		err = a.ask("write", writeRequest{Stream: made.Stream, Length: blockSize, Cuts: [][2]int64{{0, 1}}}, nil)
	}
	if err == nil {
		err = made.fill(blockSize, counted(blockSize/2))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(made.Memory)
	select {} // until it is killed
}

// A client that is killed in the middle of a block leaves neither memory nor a
// file, and earlier commits stay.
func TestKilledClient(t *testing.T) {
	a, st, h := handled(t, nil)
	if err := a.save("run/last", every); err != nil {
		t.Fatal(err)
	}
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), socket+"="+a.at, begins+"=run/last/__0_0.distcp")
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
		t.Fatal(line, err)
	}
	path := strings.TrimSpace(line)
	if _, err := os.Stat(path); err != nil || h.Busy() == "" {
		t.Fatalf("the client has no memory: %v, %q", err, h.Busy())
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // the error of a killed process
	until(t, "the memory of the killed client is not freed", func() bool {
		_, err := os.Stat(path)
		return errors.Is(err, fs.ErrNotExist)
	})
	if err := a.ask("remove", removeRequest{Path: "run/last/" + metadataTemp}, nil); err == nil {
		t.Error("a pending file that was never written is removed")
	}
	if got, err := a.get("run/last"); err != nil || !same(got, files(t, every)) {
		t.Errorf("the checkpoint before: %v", err)
	}
	left, err := filepath.Glob(filepath.Join(st.Data.Dir(), ".pending", "*", "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// A client that truncates its memory loses its file, and no other client loses
// anything.
func TestMemoryIsCutOff(t *testing.T) {
	a, _, _ := handled(t, nil)
	if err := a.save("run/step-1", every); err != nil {
		t.Fatal(err)
	}
	var made createReply
	if err := a.ask("create", createRequest{"run/x/a.distcp"}, &made); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(made.Memory, 0); err != nil {
		t.Fatal(err)
	}
	err := a.ask("close", closeRequest{writeRequest{Stream: made.Stream, Length: blockSize, Cuts: [][2]int64{{0, 1}}}, blockSize}, nil)
	if r := (*refusal)(nil); !errors.As(err, &r) || r.status != http.StatusInternalServerError {
		t.Errorf("memory that is not there: %v", err)
	}
	if got, err := a.get("run/step-1"); err != nil || !same(got, files(t, every)) {
		t.Errorf("another checkpoint: %v", err)
	}
}

// A process that has died before its file was open leaves no open file.
func TestDiedBeforeItsFileWasOpen(t *testing.T) {
	a, _, h := handled(t, nil)
	if err := a.save("run/step-1", every); err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), socket+"="+at, begins+"=run/step-2/__0_0.distcp")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = c.Process.Kill()
	_ = c.Wait() // it was killed
	ctx := peer.Context(t.Context(), conn)
	if _, err := h.create(ctx, createRequest{"run/step-2/__0_0.distcp"}); err == nil {
		t.Error("a file is begun for a process that is gone")
	}
	if _, err := h.open(ctx, pathRequest{"run/step-1/.metadata"}); err == nil {
		t.Error("a file is opened for a process that is gone")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n, m := len(h.streams), len(h.reads); n+m > 0 {
		t.Errorf("%d files are written and %d read", n, m)
	}
}

// If another process removes memory, the streams that use it fail; later streams
// get other memory.
func TestMemoryRemovedFromOutside(t *testing.T) {
	m := newMemory(t.TempDir(), slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
	})
	lost, err := m.take()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Dir(lost.file.Name())); err != nil {
		t.Fatal(err)
	}
	m.keep(lost)
	r, err := m.take()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(r.file.Name()); err != nil {
		t.Errorf("a client could not open it: %v", err)
	}
	m.keep(r)
}
