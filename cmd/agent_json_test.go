package cmd_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/agent"
)

// TestAgentJSON: the agent's commands print what testdata/schema records.
func TestAgentJSON(t *testing.T) {
	t.Parallel()
	store := "--store=" + filepath.Join(t.TempDir(), "ckpts")
	first := output(t, 0, "ckptstore", "agent", "start", "--json", "--idle=0", store)
	t.Cleanup(func() { // for a failed test; otherwise the agent has ended
		_ = exec.Command("ckptstore", "agent", "stop", "--now", "--wait=2m", store).Run()
	})
	schema(t, "agent-start", first)
	if again := output(t, 0, "ckptstore", "agent", "start", "--json", store); again != first {
		t.Errorf("a second start prints %s, the first printed %s", again, first)
	}
	var c agent.Card
	decode(t, first, &c)
	joinAgent(t, c)
	schema(t, "agent-status", output(t, 0, "ckptstore", "agent", "status", "--json", store))
	schema(t, "agent-stop", output(t, 0, "ckptstore", "agent", "stop", "--json", "--now", "--wait=2m", store))
}

// joinAgent makes this process the only rank of a run.
func joinAgent(t *testing.T, c agent.Card) {
	t.Helper()
	body, err := json.Marshal(agent.JoinRequest{Protocols: []int{client.Protocol}, Key: "k", Run: "r", WorldSize: 1, PID: os.Getpid()})
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://agent/v1/join", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+c.Token)
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", c.Socket)
	}}
	reply, err := (&http.Client{Transport: transport}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reply.Body.Close() }()
	if reply.StatusCode != http.StatusOK {
		text, err := io.ReadAll(reply.Body)
		t.Fatalf("join: status %d: %s %v", reply.StatusCode, text, err)
	}
}
