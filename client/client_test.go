package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/tensor"
)

func TestMain(m *testing.M) {
	if os.Getenv(heldEnv) != "" {
		os.Exit(holdSignals())
	}
	goleak.VerifyTestMain(m)
}

// serve starts a trainer that answers every request after hello with body.
func serve(t *testing.T, status int, body string) *Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/v1/hello", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusUnauthorized)
		}
		_, _ = w.Write([]byte(`{"protocol":3,"run":"r","attempt":2,"rank":1,"world_size":3,"resume":"step-1.a1","config":{"lr":0.5}}`))
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	})
	server := &http.Server{Handler: mux}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Setenv(EnvSocket, socket)
	t.Setenv(EnvToken, "secret")
	c, err := Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return c
}

func TestConnect(t *testing.T) {
	c := serve(t, http.StatusOK, `{}`)
	want := Context{Protocol: 3, Run: "r", Attempt: 2, Rank: 1, WorldSize: 3, Resume: "step-1.a1", Config: map[string]any{"lr": 0.5}}
	if !reflect.DeepEqual(c.Context, want) {
		t.Errorf("context %+v", c.Context)
	}
	t.Setenv(EnvToken, "wrong")
	var refusal *Error
	if _, err := Connect(t.Context()); !errors.As(err, &refusal) || refusal.Status != http.StatusUnauthorized {
		t.Errorf("with a wrong token: %v", err)
	}
	t.Setenv(EnvSocket, filepath.Join(t.TempDir(), "absent"))
	if _, err := Connect(t.Context()); err == nil || !strings.Contains(err.Error(), "hello: the trainer does not answer") {
		t.Errorf("without a listener: %v", err)
	}
	t.Setenv(EnvSocket, "")
	if _, err := Connect(t.Context()); !errors.Is(err, ErrNoTrainer) || !strings.Contains(err.Error(), "trainer run -- COMMAND") {
		t.Errorf("without a trainer: %v", err)
	}
}

// An error names the request and the answer.
func TestAnswers(t *testing.T) {
	for _, c := range []struct {
		status int
		body   string
		says   string
	}{
		{409, `{"error":"rank 1 is gone"}`, "report: rank 1 is gone"},
		{500, `{}`, `report: 500 Internal Server Error: "{}"`},
		{502, `<html>`, `report: 502 Bad Gateway: "<html>"`},
	} {
		err := serve(t, c.status, c.body).Report(t.Context(), 1, nil)
		var refusal *Error
		if !errors.As(err, &refusal) || refusal.Status != c.status || refusal.Op != "report" || err.Error() != c.says {
			t.Errorf("error %v, want %q", err, c.says)
		}
	}
	_, err := serve(t, http.StatusOK, `<html>`).Save(t.Context(), 1, State{}, SaveOptions{})
	if err == nil || !strings.Contains(err.Error(), "save: decode the trainer's reply") {
		t.Errorf("error %v", err)
	}
	if err := serve(t, http.StatusOK, `{}`).Report(t.Context(), 1, map[string]any{"f": func() {}}); err == nil || !strings.Contains(err.Error(), "report: encode request") {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := serve(t, http.StatusOK, `{}`).Report(ctx, 1, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// An inconsistent state is refused before anything is sent.
func TestInconsistentState(t *testing.T) {
	good := tensor.Shard{FQN: "w", DType: tensor.Float32, Global: tensor.Shape{4}, Box: tensor.Box{Offsets: []int64{0}, Sizes: []int64{2}}}
	outside := good
	outside.Box = tensor.Box{Offsets: []int64{3}, Sizes: []int64{2}}
	c := serve(t, http.StatusTeapot, "asked")
	for _, bad := range []struct {
		says   string
		tensor Tensor
	}{
		{`tensor "w" has 7 bytes of data, its box [0]+[2] needs 8`, Tensor{Shard: good, Data: make([]byte, 7)}},
		{`tensor "w" has 0 bytes of data`, Tensor{Shard: good}},
		{`"w"`, Tensor{Shard: outside, Data: make([]byte, 8)}},
		{"name", Tensor{}},
	} {
		state := State{Tensors: []Tensor{bad.tensor}}
		if _, err := c.Save(t.Context(), 1, state, SaveOptions{}); err == nil || !strings.HasPrefix(err.Error(), "save: ") || !strings.Contains(err.Error(), bad.says) {
			t.Errorf("save: %v, want %q", err, bad.says)
		}
		says := strings.ReplaceAll(strings.ReplaceAll(bad.says, "has ", "has room for "), " of data", "")
		if _, err := c.Load(t.Context(), &state, LoadOptions{}); err == nil || !strings.HasPrefix(err.Error(), "load: ") || !strings.Contains(err.Error(), says) {
			t.Errorf("load: %v, want %q", err, says)
		}
	}
}

func TestAborted(t *testing.T) {
	s := &Save{Checkpoint: "step-1.a1", c: serve(t, http.StatusOK, `{"state":"aborted","reason":"rank 2 is gone"}`)}
	var aborted *AbortedError
	if err := s.Wait(t.Context(), Committed); !errors.As(err, &aborted) || err.Error() != "checkpoint step-1.a1 was aborted: rank 2 is gone" {
		t.Errorf("error %v", err)
	}
}

// Missing shared memory is an error of the save or load, not a crash.
func TestNoArena(t *testing.T) {
	c := serve(t, http.StatusOK, `{"checkpoint":"x.a1","arena":"/no/such/arena","size":64,"arenas":[{"path":"/no/such/arena","size":64}],"in":[0],"offsets":[0],"sizes":[1]}`)
	state := State{Values: []Value{{FQN: "v", Data: []byte{1}}}}
	if _, err := c.Save(t.Context(), 1, state, SaveOptions{}); err == nil || !strings.Contains(err.Error(), "save: open shared memory: open /no/such/arena") {
		t.Errorf("save: %v", err)
	}
	if _, err := c.Load(t.Context(), &state, LoadOptions{}); err == nil || !strings.Contains(err.Error(), "load: open checkpoint data") {
		t.Errorf("load: %v", err)
	}
	if state.Values[0].Data[0] != 1 {
		t.Error("the failed load has changed the state")
	}
}

func TestFinite(t *testing.T) {
	for _, c := range []struct{ in, want any }{
		{1.5, 1.5},
		{float32(1.5), 1.5},
		{math.MaxFloat64, math.MaxFloat64},
		{-math.MaxFloat64, -math.MaxFloat64},
		{math.NaN(), "NaN"},
		{math.Inf(1), "Infinity"},
		{float32(math.Inf(-1)), "-Infinity"},
		{"text", "text"},
		{7, 7},
		{nil, nil},
	} {
		if got := finite(c.in); got != c.want {
			t.Errorf("finite(%v) is %v, want %v", c.in, got, c.want)
		}
	}
}

// Parts survive a round trip, and truncated data does not decode to all of them.
func TestParts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 20), 0, 5).Draw(t, "parts")
		data := EncodeParts(parts)
		got, err := DecodeParts(data)
		if err != nil || len(got) != len(parts) {
			t.Fatalf("%d parts, %v", len(got), err)
		}
		for i := range parts {
			if string(got[i]) != string(parts[i]) {
				t.Fatalf("part %d is %v", i, got[i])
			}
		}
		if cut := rapid.IntRange(0, len(data)).Draw(t, "cut"); cut < len(data) {
			short, err := DecodeParts(data[:cut])
			if err == nil && len(short) >= len(parts) {
				t.Fatalf("cut at %d of %d gives %d parts", cut, len(data), len(short))
			}
		}
	})
}

func FuzzDecodeParts(f *testing.F) {
	f.Add(EncodeParts([][]byte{{1}, nil, {2, 3}}))
	f.Add([]byte{255, 255, 255, 255, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, data []byte) {
		parts, err := DecodeParts(data)
		if err == nil && string(EncodeParts(parts)) != string(data) {
			t.Errorf("%x decodes to %v", data, parts)
		}
	})
}

// A reply that does not match the request is an error that names the item, and
// the state is unchanged.
func TestUnfitLoad(t *testing.T) {
	w := tensor.Shard{FQN: "w", DType: tensor.Uint8, Global: tensor.Shape{4}, Box: tensor.Box{Offsets: []int64{0}, Sizes: []int64{4}}}
	for _, c := range []struct{ lie, says string }{
		{`"offsets":[0,4],"sizes":[4]`, "load: the trainer sent 2 offsets, 1 sizes and the files of 2 for 2 items"},
		{`"offsets":[0],"sizes":[4,1]`, "load: the trainer sent 1 offsets, 2 sizes and the files of 2 for 2 items"},
		{`"offsets":[0,4,5],"sizes":[4,1,1]`, "load: the trainer sent 3 offsets, 3 sizes and the files of 2 for 2 items"},
		{`"offsets":[0,4],"sizes":[3,1]`, `load: the trainer sent 3 bytes of tensor "w", its box [0]+[4] needs 4`},
		{`"offsets":[0,60],"sizes":[4,5]`, `load: the trainer sent "v" as 5 bytes at 60, in memory of 64 bytes`},
		{`"offsets":[0,65],"sizes":[4,0]`, `load: the trainer sent "v" as 0 bytes at 65, in memory of 64 bytes`},
		{`"offsets":[-1,4],"sizes":[4,1]`, `load: the trainer sent "w" as 4 bytes at -1, in memory of 64 bytes`},
		{`"offsets":[9223372036854775807,4],"sizes":[4,1]`, `load: the trainer sent "w" as 4 bytes at 9223372036854775807, in memory of 64 bytes`},
		{`"offsets":[0,4],"sizes":[4,1],"in":[0,1]`, `load: the trainer sent "v" in file 1 of 1`},
		{`"offsets":[0,4],"sizes":[4,1],"in":[-1,0]`, `load: the trainer sent "w" in file -1 of 1`},
		{`"offsets":[0,4],"sizes":[4,1],"in":[0]`, "load: the trainer sent 2 offsets, 2 sizes and the files of 1 for 2 items"},
	} {
		state := State{Tensors: []Tensor{{Shard: w, Data: []byte{1, 2, 3, 4}}}, Values: []Value{{FQN: "v", Data: []byte{5}}}}
		trainer := serve(t, http.StatusOK, `{"checkpoint":"x.a1","arenas":[{"path":"/no/such/arena","size":64}],"in":[0,0],`+c.lie+`}`)
		if _, err := trainer.Load(t.Context(), &state, LoadOptions{}); err == nil || err.Error() != c.says {
			t.Errorf("%s: error %v, want %q", c.lie, err, c.says)
		}
		if string(state.Tensors[0].Data) != "\x01\x02\x03\x04" || string(state.Values[0].Data) != "\x05" {
			t.Errorf("%s: the state is changed to %+v", c.lie, state)
		}
	}
}

// A file shorter than the trainer stated is an error, not SIGBUS, and the state is unchanged.
func TestShortArena(t *testing.T) {
	path := filepath.Join(t.TempDir(), "short")
	if err := os.WriteFile(path, []byte{7}, 0o600); err != nil {
		t.Fatal(err)
	}
	c := serve(t, http.StatusOK, fmt.Sprintf(`{"checkpoint":"x.a1","load":1,"arenas":[{"path":%q,"size":64}],"in":[0],"offsets":[0],"sizes":[1]}`, path))
	state := State{Values: []Value{{FQN: "v", Data: []byte{1}}}}
	if _, err := c.Load(t.Context(), &state, LoadOptions{}); err == nil || !strings.Contains(err.Error(), "has 1 bytes, the trainer stated 64") {
		t.Errorf("load: %v", err)
	}
	if state.Values[0].Data[0] != 1 {
		t.Error("the failed load has changed the state")
	}
}
