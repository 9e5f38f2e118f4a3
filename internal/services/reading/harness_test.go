package reading

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/peer"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// patience bounds the wait for expected events.
const patience = 60 * time.Second

// callerEnv makes this program a caller that is killed: see TestMain.
const callerEnv = "CKPTSTORE_TEST_READS"

func TestMain(m *testing.M) {
	if args := os.Getenv(callerEnv); args != "" {
		var socket, body string
		if err := json.Unmarshal([]byte(args), &[]any{&socket, &body}); err != nil {
			panic(err)
		}
		data, status, err := post(context.Background(), socket, "read", []byte(body))
		if err != nil || status != http.StatusOK {
			panic(fmt.Sprint(status, string(data), err))
		}
		fmt.Println(string(data))
		<-time.After(10 * time.Minute) // it is killed here
		return
	}
	os.Exit(m.Run())
}

// served is a store with a checkpoint, and a server of it on a socket.
type served struct {
	testing.TB
	store  *store.Store
	dir    string // of the store
	server *Server
	socket string
	shared string
}

// serve imports checkpoints of other programs as steps 0, 1, … of run "a".
func serve(t testing.TB, paths ...string) *served {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	s := &served{TB: t, dir: filepath.Join(t.TempDir(), "store"), shared: t.TempDir()}
	if err := store.Ensure(t.Context(), s.dir, patience, quiet); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.store, err = store.Open(t.Context(), store.Options{Location: s.dir, Patience: patience}); err != nil {
		t.Fatal(err)
	}
	for step, path := range paths {
		from, err := store.OpenForeign(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		_, err = session.Import(t.Context(), session.ImportConfig{
			Run: "a", Trial: projections.DefaultTrial, Job: store.NewID(), Step: int64(step), From: from, Command: []string{"import"},
			Reap: process.ReapEarlier, Logger: quiet, NewID: store.NewID,
		}, session.Store{
			ID: s.store.ID, Log: s.store.Log, Views: store.Queries{From: s.store.Views()}, Blobs: s.store.Blobs, Data: s.store.Data,
			Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) }, Unserved: store.Unserved,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	s.server = New(s.store, Options{Shared: s.shared})
	mux := http.NewServeMux()
	s.server.Handle(mux)
	s.socket = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	listener := &http.Server{Handler: mux, ConnContext: peer.Context}
	go func() { _ = listener.Serve(l) }()
	t.Cleanup(func() {
		if err := errors.Join(listener.Close(), s.server.Close(), s.store.Close()); err != nil {
			t.Error(err)
		}
		if left := s.files(); len(left) > 0 {
			t.Errorf("left in shared memory: %q", left)
		}
	})
	return s
}

// files returns the files in shared memory, without locks.
func (s *served) files() []string {
	s.Helper()
	found, err := filepath.Glob(filepath.Join(s.shared, "*", "*", "[0-9]*"))
	if err != nil {
		s.Fatal(err)
	}
	return found
}

// post sends one request.
func post(ctx context.Context, socket, name string, body []byte) ([]byte, int, error) {
	c := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://store/v1/store/"+name, bytes.NewReader(body))
	if err != nil {
		return nil, 0, err
	}
	reply, err := c.Do(r)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = reply.Body.Close() }()
	data, err := io.ReadAll(reply.Body)
	return data, reply.StatusCode, err
}

// ask sends one request and expects a status.
func ask[Out any](s *served, name string, request any, status int) (out Out) {
	s.Helper()
	body, err := json.Marshal(request)
	if err != nil {
		s.Fatal(err)
	}
	data, got, err := post(s.Context(), s.socket, name, body)
	if err != nil || got != status {
		s.Fatalf("%s %s: status %d, %s, %v; want %d", name, body, got, data, err, status)
	}
	if err := json.Unmarshal(data, &out); err != nil {
		s.Fatalf("%s: %s: %v", name, data, err)
	}
	return out
}

// refused returns the text of an error.
func (s *served) refused(name string, request any, status int) string {
	s.Helper()
	return ask[client.Problem](s, name, request, status).Message
}

// item returns the item of a whole tensor or value.
func (s *served) item(d Description, fqn string) client.Item {
	s.Helper()
	if t, ok := d.Tensors[fqn]; ok {
		return client.Item{FQN: fqn, DType: t.DType, Shape: t.Shape, Offsets: make([]int64, len(t.Shape)), Sizes: t.Shape}
	}
	if _, ok := d.Values[fqn]; !ok {
		s.Fatalf("there is no %q", fqn)
	}
	return client.Item{FQN: fqn, Value: true}
}

// bytesOf returns the bytes of an item of a reply.
func (s *served) bytesOf(r Reply, i int) []byte {
	s.Helper()
	data, err := os.ReadFile(r.Arenas[r.In[i]].Path)
	if err != nil {
		s.Fatal(err)
	}
	return data[r.Offsets[i] : r.Offsets[i]+r.Sizes[i]]
}

// safetensors writes a file of uint8 tensors of so many rows of 1 KiB; byte i of
// tensor n is i+n modulo 251.
func safetensors(t testing.TB, rows ...int) string {
	t.Helper()
	type entry struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets []int  `json:"data_offsets"`
	}
	header, at := map[string]entry{}, 0
	for n, rows := range rows {
		header[fmt.Sprintf("t%d", n)] = entry{"U8", []int{rows, 1024}, []int{at, at + rows*1024}}
		at += rows * 1024
	}
	text, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	var out bytes.Buffer
	out.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(text))))
	out.Write(text)
	for n, rows := range rows {
		out.Write(pattern(n, rows*1024))
	}
	path := filepath.Join(t.TempDir(), "model.safetensors")
	if err := os.WriteFile(path, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func pattern(n, size int) []byte {
	data := make([]byte, size)
	for i := range data {
		data[i] = byte((i + n) % 251)
	}
	return data
}

// until polls until a condition holds.
func until(t testing.TB, what string, holds func() bool) {
	t.Helper()
	tick, end := time.NewTicker(5*time.Millisecond), time.After(patience)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("after %v: %s", patience, what)
		}
	}
}
