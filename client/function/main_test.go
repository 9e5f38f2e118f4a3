package function

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
)

// asked is a request that arrived over the socket.
type asked struct {
	Op   string
	Body client.Report
}

// door is the trainer's end of a socket: it records the requests and answers
// reports with a status.
func door(t *testing.T, status int) func() []asked {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var got []asked
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a := asked{Op: strings.TrimPrefix(r.URL.Path, "/v1/")}
		if a.Op == "hello" {
			_ = json.NewEncoder(w).Encode(client.Context{Protocol: client.Protocol})
			return
		}
		if a.Op == "hold_signals" {
			<-r.Context().Done() // this trainer ends no worker
			return
		}
		if err := json.NewDecoder(r.Body).Decode(&a.Body); err != nil {
			t.Error(err)
		}
		got = append(got, a) // one request at a time
		w.WriteHeader(status)
		_, _ = w.Write([]byte("{}"))
	})}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Setenv(client.EnvSocket, socket)
	t.Setenv(envErrorFile, "")
	return func() []asked {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
		return got
	}
}

func reportsTwice(ctx context.Context, _ Config, p *Reporter) error {
	return errors.Join(p.Report(ctx, Result{"a": 1, TimeThisIter: 2}), p.Report(ctx, Result{"a": 2, TimeThisIter: 3, Step: 7, Done: true}))
}

// The last report has its own field for "done", outside the metrics.
func TestMainReports(t *testing.T) {
	got := door(t, http.StatusOK)
	var stderr bytes.Buffer
	if code := run(t.Context(), reportsTwice, &stderr); code != exitDone {
		t.Errorf("exit code %d: %s", code, &stderr)
	}
	want := []asked{
		{"report", client.Report{Step: 1, Metrics: map[string]any{"a": 1.0, TimeThisIter: 2.0}}},
		{"report", client.Report{Step: 7, Metrics: map[string]any{"a": 2.0, TimeThisIter: 3.0}, Done: true}},
	}
	if all := got(); !reflect.DeepEqual(all, want) {
		t.Errorf("the trainer was asked %+v, want %+v", all, want)
	}
}

// Main advises a function that never reports to do so, unless the trainer runs with --quiet.
func TestMainQuiet(t *testing.T) {
	for quiet, advised := range map[string]bool{"": true, "1": false} {
		got := door(t, http.StatusOK)
		t.Setenv(client.EnvQuiet, quiet)
		var stderr bytes.Buffer
		if code := run(t.Context(), func(context.Context, Config) {}, &stderr); code != exitDone {
			t.Errorf("exit code %d: %s", code, &stderr)
		}
		if strings.Contains(stderr.String(), "without a report") != advised {
			t.Errorf("with %s=%q it prints %q", client.EnvQuiet, quiet, &stderr)
		}
		got()
	}
}

// A refused report ends the function; a report without room does not.
func TestMainRefused(t *testing.T) {
	for status, want := range map[int]int{http.StatusConflict: exitFailed, http.StatusInsufficientStorage: exitDone} {
		got := door(t, status)
		var stderr bytes.Buffer
		if code := run(t.Context(), reportsTwice, &stderr); code != want {
			t.Errorf("status %d: exit code %d, want %d: %s", status, code, want, &stderr)
		}
		if n := len(got()); (n == 2) != (want == exitDone) {
			t.Errorf("status %d: %d reports", status, n)
		}
	}
}

func TestMainWithoutTrainer(t *testing.T) {
	t.Setenv(client.EnvSocket, "")
	var stderr bytes.Buffer
	if code := run(t.Context(), reportsTwice, &stderr); code != exitConfig || !strings.Contains(stderr.String(), "trainer run -- COMMAND") {
		t.Errorf("exit code %d: %s", code, &stderr)
	}
	stderr.Reset()
	if code := run(t.Context(), 7, &stderr); code != exitConfig || !strings.Contains(stderr.String(), "want func(context.Context, function.Config") {
		t.Errorf("exit code %d: %s", code, &stderr)
	}
}
