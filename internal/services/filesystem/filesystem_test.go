package filesystem

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/peer"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Checkpoints that PyTorch has written.
const (
	every  = "../../format/dcp/testdata/torch-2.15/every"
	mesh   = "../../format/dcp/testdata/torch-2.14/mesh2x2"
	socket = "CKPTSTORE_TEST_SOCKET"
	where  = "CKPTSTORE_TEST_STORE"
	begins = "CKPTSTORE_TEST_FILE" // file that a client begins, and does not end
)

// limit bounds the wait for a process: the machine may be busy.
const limit = time.Minute

// The test program can also serve a store, or write half of a block of a file, so
// that it can be killed.
func TestMain(m *testing.M) {
	if os.Getenv(socket) == "" {
		os.Exit(m.Run())
	}
	if path := os.Getenv(begins); path != "" {
		os.Exit(beginFile(path, os.Getenv(socket)))
	}
	if err := serve(os.Getenv(where), os.Getenv(socket)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(dir, at string) error {
	st, err := store.Open(context.Background(), store.Options{Location: dir, Patience: limit})
	if err != nil {
		return err
	}
	l, err := net.Listen("unix", at+".new")
	if err != nil {
		return err
	}
	if err := os.Rename(at+".new", at); err != nil {
		return err
	}
	mux := http.NewServeMux()
	New(st, slog.New(slog.DiscardHandler)).Handle(mux)
	return (&http.Server{Handler: mux, ConnContext: peer.Context}).Serve(l)
}

// asker sends requests to a server, and can kill it before a given request.
type asker struct {
	t    testing.TB
	at   string
	http *http.Client
	left int // requests until the server is killed; below 0: never
	kill func()
}

func newAsker(t testing.TB, at string) *asker {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", at)
	}
	transport := &http.Transport{DialContext: dial}
	if t != nil {
		t.Cleanup(transport.CloseIdleConnections)
	}
	return &asker{t: t, at: at, http: &http.Client{Transport: transport, Timeout: limit}, left: -1}
}

// refusal is an error reply.
type refusal struct {
	status int
	text   string
}

func (r *refusal) Error() string { return fmt.Sprintf("%d: %s", r.status, r.text) }

func (a *asker) ask(name string, in, out any) error {
	if a.left == 0 {
		a.kill()
	}
	a.left--
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	r, err := a.http.Post("http://ckptstore"+Prefix+name, "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	data, err := io.ReadAll(r.Body)
	if err = errors.Join(err, r.Body.Close()); err != nil {
		return err
	}
	if r.StatusCode != http.StatusOK {
		return &refusal{r.StatusCode, string(data)}
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(data, out)
}

// put writes a file in pieces, some of which are declared as tensors'.
func (a *asker) put(path string, data []byte) error {
	var made createReply
	if err := a.ask("create", createRequest{Path: path}, &made); err != nil {
		return err
	}
	half := min(len(data)/2, made.Block)
	if err := made.fill(0, data[:half]); err != nil {
		return err
	}
	if err := a.ask("write", writeRequest{Stream: made.Stream, Length: half, Cuts: [][2]int64{{0, 1}, {int64(half / 2), 0}}}, nil); err != nil {
		return err
	}
	at := half
	for {
		end := min(len(data), (at/made.Block+1)*made.Block)
		if err := made.fill(at, data[at:end]); err != nil {
			return err
		}
		said := writeRequest{Stream: made.Stream, Offset: int64(at), Length: end - at}
		if end == len(data) {
			return a.ask("close", closeRequest{said, int64(end)}, nil)
		}
		if err := a.ask("write", said, nil); err != nil {
			return err
		}
		at = end
	}
}

// fill copies bytes of a written file, which lie in one block, to their place in
// memory.
func (c createReply) fill(offset int, data []byte) error {
	file, err := os.OpenFile(c.Memory, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(data, int64(offset%(c.Block*c.Blocks)))
	return errors.Join(err, file.Close())
}

// save writes the files of a directory and commits them.
func (a *asker) save(url, dir string) error {
	for name, data := range files(a.t, dir) {
		if name != metadataFile {
			if err := a.put(url+"/"+name, data); err != nil {
				return err
			}
		}
	}
	if err := a.put(url+"/"+metadataTemp, files(a.t, dir)[metadataFile]); err != nil {
		return err
	}
	if err := a.ask("remove", removeRequest{Path: url + "/" + metadataFile}, nil); err != nil {
		return err
	}
	return a.ask("rename", renameRequest{url + "/" + metadataTemp, url + "/" + metadataFile}, nil)
}

func files(t testing.TB, dir string) map[string][]byte {
	t.Helper()
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]byte{}
	for _, n := range names {
		if n.Name() == metadataFile || strings.HasSuffix(n.Name(), dataSuffix) {
			if out[n.Name()], err = os.ReadFile(filepath.Join(dir, n.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	return out
}

// get returns all files of a checkpoint, verified.
func (a *asker) get(url string) (map[string][]byte, error) {
	var list listReply
	if err := a.ask("list", pathRequest{url}, &list); err != nil {
		return nil, err
	}
	out := map[string][]byte{}
	for _, n := range list.Entries {
		var r openReply
		if err := a.ask("open", pathRequest{n.Name}, &r); err != nil {
			return nil, err
		}
		if err := a.ask("verify", verifyRequest{Read: r.Read, Length: r.Size}, nil); err != nil {
			return nil, err
		}
		data, err := os.ReadFile(r.Path)
		if err != nil {
			return nil, err
		}
		out[filepath.Base(n.Name)] = data
		if err := a.ask("done", doneRequest{r.Read}, nil); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func same(a, b map[string][]byte) bool {
	for name := range a {
		if !bytes.Equal(a[name], b[name]) {
			return false
		}
	}
	return len(a) == len(b)
}

// here serves a new store in this process.
func here(t *testing.T) (*asker, *store.Store) {
	t.Helper()
	a, st, _ := handled(t, nil)
	return a, st
}

// handled is here with its handler, which change may modify before it serves.
func handled(t *testing.T, change func(*Handler)) (*asker, *store.Store, *Handler) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	if err := store.Ensure(t.Context(), dir, limit, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	return handledIn(t, dir, change)
}

// handledIn is handled with a store that exists.
func handledIn(t *testing.T, dir string, change func(*Handler)) (*asker, *store.Store, *Handler) {
	t.Helper()
	st, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	h := New(st, slog.New(slog.DiscardHandler))
	h.memory.files.Shared = t.TempDir()
	if change != nil {
		change(h)
	}
	mux := http.NewServeMux()
	h.Handle(mux)
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: mux, ConnContext: peer.Context}
	over := make(chan error, 1)
	go func() { over <- server.Serve(l) }()
	t.Cleanup(func() {
		if err := errors.Join(server.Close(), h.Close(), st.Close()); err != nil {
			t.Error(err)
		}
		if err := <-over; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return newAsker(t, at), st, h
}

// A written file is read back unchanged, and is a checkpoint of the store.
func TestFilesComeBack(t *testing.T) {
	a, st := here(t)
	for i, dir := range []string{every, mesh} {
		url := fmt.Sprintf("run/step-%d", i)
		if err := a.save(url, dir); err != nil {
			t.Fatal(err)
		}
		got, err := a.get(url)
		want := files(t, dir)
		for name, data := range want {
			if len(data) == 0 && name != metadataFile {
				delete(want, name) // it has no named item
			}
		}
		if err != nil || !same(got, want) {
			t.Errorf("%s: other files came back: %v", dir, err)
		}
		row, err := store.Committed(t.Context(), st.Views(), "run@"+fmt.Sprintf("step-%d", i))
		if err != nil {
			t.Fatal(err)
		}
		digest, err := checkpoint.ParseDigest(row.Manifest)
		if err != nil {
			t.Fatal(err)
		}
		report, err := st.Data.Verify(t.Context(), store.RefOf(row), digest, nil)
		if err != nil || len(report.Findings) > 0 || len(report.Extra) > 0 || row.Step != int64(i) {
			t.Errorf("%s: step %d, %+v, %v", dir, row.Step, report, err)
		}
		if left, err := os.ReadDir(filepath.Join(st.Data.Dir(), ".pending")); err != nil || len(left) > 0 {
			t.Errorf("left %v, %v", left, err)
		}
	}
}

// TestIDs: a checkpoint is read by its ID too, also when a newer one has its name, and
// from another run. A write under an ID is refused.
func TestIDs(t *testing.T) {
	a, st := here(t)
	var ids []string
	for _, dir := range []string{every, mesh} {
		if err := a.save("run/step-7", dir); err != nil {
			t.Fatal(err)
		}
		row, err := store.Committed(t.Context(), st.Views(), "run@step-7")
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, row.ID)
	}
	old, err := a.get("run/" + ids[0])
	if err != nil || string(old[metadataFile]) != string(files(t, every)[metadataFile]) {
		t.Errorf("by the ID %s another checkpoint is read: %v", ids[0], err)
	}
	if now, err := a.get("run/step-7"); err != nil || string(now[metadataFile]) != string(files(t, mesh)[metadataFile]) {
		t.Errorf("by the name an older checkpoint is read: %v", err)
	}
	other, err := a.get("child/run@" + ids[0])
	if err != nil || string(other[metadataFile]) != string(files(t, every)[metadataFile]) {
		t.Errorf("from another run, as a fork resumes: %v", err)
	}
	if err := a.save("run/"+ids[0], mesh); err == nil || !strings.Contains(err.Error(), "form of a checkpoint's ID") {
		t.Errorf("a save under an ID: %v", err)
	}
	if _, err := a.get("run/step-7.a99"); err == nil {
		t.Error("an ID that does not exist is read")
	}
	if err := a.ask("remove", removeRequest{Path: "run/" + ids[0], Recursive: true}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := a.get("run/" + ids[0]); err == nil {
		t.Error("a removed checkpoint is read by its ID")
	}
	if now, err := a.get("run/step-7"); err != nil || string(now[metadataFile]) != string(files(t, mesh)[metadataFile]) {
		t.Errorf("the newer checkpoint of the name went with it: %v", err)
	}
}

// killable starts killable servers of one store, one after the other.
func killable(t *testing.T) (start func() (a *asker, kill func()), dir string) {
	t.Helper()
	base := t.TempDir()
	dir, at := filepath.Join(base, "store"), filepath.Join(base, "s")
	if err := store.Ensure(t.Context(), dir, limit, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	return func() (*asker, func()) {
		_ = os.Remove(at) // of the previous server
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), socket+"="+at, where+"="+dir)
		c.Stderr = os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		a := newAsker(t, at)
		for tick, end := time.Tick(10*time.Millisecond), time.Now().Add(limit); ; <-tick {
			if _, err := os.Stat(at); err == nil {
				break
			} else if time.Now().After(end) {
				t.Fatal("the server does not start")
			}
		}
		dead := false
		a.kill = func() {
			if !dead {
				dead = true
				_ = c.Process.Kill()
				_ = c.Wait() // the error of a killed process
			}
		}
		return a, a.kill
	}, dir
}

// A server that is killed before any request of a save leaves the previous
// checkpoint, or its own; the next save is complete.
func TestKilledServer(t *testing.T) {
	start, dir := killable(t)
	const url = "run/last"
	a, kill := start()
	if err := a.save(url, every); err != nil {
		t.Fatal(err)
	}
	kill()
	old := every
	for n, over := 0, false; !over; n++ {
		a, kill := start()
		next := map[string]string{every: mesh, mesh: every}[old]
		a.left = n
		err := a.save(url, next)
		over = err == nil && a.left >= 0
		kill()
		b, end := start()
		got, gerr := b.get(url)
		if gerr != nil {
			t.Fatalf("after %d requests, %v: %v", n, err, gerr)
		}
		switch {
		case same(got, files(t, next)):
			old = next
		case err == nil || !same(got, files(t, old)):
			t.Fatalf("after %d requests, %v: neither the old nor the new checkpoint", n, err)
		}
		if left, err := os.ReadDir(filepath.Join(dir, "data", ".pending")); err != nil || len(left) > 0 {
			t.Errorf("left %v, %v", left, err)
		}
		end()
		if n > 40 {
			t.Fatal("a save makes too many requests")
		}
	}
}

// Inconsistent files are refused, and leave nothing.
func TestTornFiles(t *testing.T) {
	a, _ := here(t)
	want := files(t, every)
	refuse := func(what string, err error, status int, text string) {
		t.Helper()
		if r := (*refusal)(nil); !errors.As(err, &r) || r.status != status || !strings.Contains(r.text, text) {
			t.Errorf("%s: %v, want %d and %q", what, err, status, text)
		}
	}
	data := slices.Sorted(func(yield func(string) bool) {
		for name := range want {
			if name != metadataFile && !yield(name) {
				return
			}
		}
	})[0]
	commit := func() error {
		return a.ask("rename", renameRequest{"run/x/" + metadataTemp, "run/x/" + metadataFile}, nil)
	}
	if err := errors.Join(a.put("run/x/"+data, want[data][:len(want[data])-9]), a.put("run/x/"+metadataTemp, want[metadataFile])); err != nil {
		t.Fatal(err)
	}
	refuse("a file that was cut off", commit(), http.StatusConflict, "")

	var first, second createReply
	if err := errors.Join(a.ask("create", createRequest{"run/x/" + data}, &first), a.ask("create", createRequest{"run/x/" + data}, &second)); err != nil {
		t.Fatal(err)
	}
	refuse("a file that was replaced", a.ask("write", writeRequest{Stream: first.Stream}, nil), http.StatusConflict, "replaced or removed")
	refuse("a file that is open", commit(), http.StatusConflict, "")
	refuse("an offset", a.ask("write", writeRequest{Stream: second.Stream, Offset: 7}, nil), http.StatusBadRequest, "at 7")
	refuse("more than a block", a.ask("write", writeRequest{Stream: second.Stream, Length: blockSize + 1}, nil), http.StatusBadRequest, "the block ends")
	refuse("another size", a.ask("close", closeRequest{writeRequest{Stream: second.Stream, Length: 10}, 11}, nil), http.StatusBadRequest, "10 were written")
	refuse("a stream after its close", a.ask("write", writeRequest{Stream: second.Stream, Offset: 10}, nil), http.StatusConflict, "no stream")
	refuse("a stream that is none", a.ask("write", writeRequest{Stream: 99}, nil), http.StatusConflict, "no stream 99")
	refuse("nothing is committed", a.ask("stat", pathRequest{"run/x"}, nil), http.StatusNotFound, "")

	if err := a.put("run/x/"+data, want[data]); err != nil {
		t.Fatal(err)
	}
	if err := commit(); err != nil {
		t.Fatal(err)
	}
	if got, err := a.get("run/x"); err != nil || !same(got, want) {
		t.Errorf("other files came back: %v", err)
	}
}

// Damage of any byte of a file is found before it is read.
func TestDamage(t *testing.T) {
	a, _ := here(t)
	if err := a.save("run/step-1", every); err != nil {
		t.Fatal(err)
	}
	var list listReply
	if err := a.ask("list", pathRequest{"run/step-1"}, &list); err != nil {
		t.Fatal(err)
	}
	for _, n := range list.Entries {
		var r openReply
		if err := a.ask("open", pathRequest{n.Name}, &r); err != nil {
			t.Fatal(err)
		}
		whole, err := os.ReadFile(r.Path)
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; at < len(whole); at += 1 + len(whole)/50 {
			bad := bytes.Clone(whole)
			bad[at] ^= 4
			if err := os.WriteFile(r.Path, bad, 0o644); err != nil {
				t.Fatal(err)
			}
			var again openReply
			if err := a.ask("open", pathRequest{n.Name}, &again); err != nil {
				t.Fatal(err)
			}
			if err := a.ask("verify", verifyRequest{Read: again.Read, Offset: int64(at), Length: 1}, nil); err == nil || !strings.Contains(err.Error(), "checksum") {
				t.Errorf("%s: a flipped bit at %d: %v", n.Name, at, err)
			}
		}
		if err := os.WriteFile(r.Path, whole[:len(whole)-1], 0o644); err != nil {
			t.Fatal(err)
		}
		var cut openReply
		if err := a.ask("open", pathRequest{n.Name}, &cut); err != nil {
			t.Fatal(err)
		}
		if err := a.ask("verify", verifyRequest{Read: cut.Read, Offset: 0, Length: int64(len(whole))}, nil); err == nil || !strings.Contains(err.Error(), "ends here") {
			t.Errorf("%s without its last byte: %v", n.Name, err)
		}
		if err := os.WriteFile(r.Path, whole, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
