package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"

	"github.com/ckptstore/ckptstore/client"
)

// joining makes a process that no trainer started a rank of an agent's group, as
// docs/reference/protocol.md describes.
type joining struct {
	agent string // the program ckptstore; empty for a worker of a trainer
	store string
	key   string // of the group
	run   string
	rank  int
	world int
}

func (j *joining) flags(flags *flag.FlagSet) {
	flags.StringVar(&j.agent, "agent", "", "program that starts or finds the agent; empty under a trainer")
	flags.StringVar(&j.store, "store", "", "store of the agent")
	flags.StringVar(&j.key, "key", "", "key of the group")
	flags.StringVar(&j.run, "run", "", "run that the group continues")
	flags.IntVar(&j.rank, "rank", 0, "rank in the group")
	flags.IntVar(&j.world, "world", 1, "ranks of the group")
}

// join puts the rank's socket into the environment, where [client.Connect] finds it.
func (j *joining) join(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	start := exec.CommandContext(ctx, j.agent, "agent", "start", "--store", j.store, "--json", "--idle", "20s", "--wait", waitForOwner)
	start.Stderr = os.Stderr
	out, err := start.Output()
	if err != nil {
		return fmt.Errorf("agent start: %w", err)
	}
	var at struct{ Socket, Token string }
	if err := json.Unmarshal(out, &at); err != nil {
		return fmt.Errorf("agent start: %q: %w", out, err)
	}
	body, err := json.Marshal(map[string]any{
		"protocols": []int{client.Protocol}, "key": j.key, "run": j.run, "rank": j.rank, "world_size": j.world, "pid": os.Getpid(),
	})
	if err != nil {
		return err
	}
	over := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", at.Socket)
	}}}
	defer over.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent/v1/join", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+at.Token)
	resp, err := over.Do(req)
	if err != nil {
		return fmt.Errorf("join: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	reply, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("join: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("join: %s: %s", resp.Status, reply)
	}
	if err := json.Unmarshal(reply, &at); err != nil {
		return fmt.Errorf("join: %q: %w", reply, err)
	}
	if err := os.Setenv(client.EnvSocket, at.Socket); err != nil {
		return err
	}
	return os.Setenv(client.EnvToken, at.Token)
}
