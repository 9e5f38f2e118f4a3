package agent

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
)

// ErrNoAgent reports that no agent serves a store.
var ErrNoAgent = problem.New(problem.NotFound, "no agent serves this store")

// ErrVersions reports that an agent and a client share no protocol version.
var ErrVersions = errors.New("the agent is of another version")

// EnvStore names the store that an agent serves.
const EnvStore = "CKPTSTORE_STORE"

// StartOptions configure the start of an agent.
type StartOptions struct {
	Program string        // path of ckptstore
	Args    []string      // after `agent`; the store is passed in $CKPTSTORE_STORE
	Version string        // of the caller's program, for messages
	Limit   time.Duration // until the agent answers
	Launch  string        // key of the launch in which the agent follows; see [StartRank]
}

// Start returns the agent of a store. If none answers, it starts an agent that
// continues in the background. Of several concurrent callers, one starts it.
// Start waits for an agent that is stopping. started reports whether this call
// started the agent, with the arguments of the options.
func Start(ctx context.Context, at store.Whereabouts, o StartOptions) (_ Card, started bool, _ error) {
	ctx, cancel := context.WithTimeout(ctx, o.Limit)
	defer cancel()
	if c, err := usable(ctx, at, o); err == nil || errors.Is(err, ErrVersions) {
		return c, false, err
	}
	lock, err := takeLock(ctx, fileOf(at.Runtime, o.Launch, startFile), o.Limit)
	if err != nil {
		return Card{}, false, fmt.Errorf("start an agent of %s: another process starts one, and has not within %v: %w", at.Name, o.Limit, err)
	}
	defer func() { _ = lock.Close() }()
	for stopping := error(nil); ; {
		c, err := usable(ctx, at, o)
		if err == nil || errors.Is(err, ErrVersions) {
			return c, false, err
		}
		if errors.Is(err, errStopping) {
			stopping = err
		} else if ctx.Err() == nil {
			break
		}
		select {
		case <-time.After(pollEvery):
		case <-ctx.Done():
			err = cmp.Or(stopping, err)
			return Card{}, false, fmt.Errorf("start an agent of %s: %w, and has not ended within %v: end its processes, or run `ckptstore agent stop --now --store %s`", at.Name, err, o.Limit, at.Name)
		}
	}
	c, err := startAgent(ctx, at, o)
	return c, err == nil, err
}

// errStopping reports that an agent takes no new sessions.
var errStopping = errors.New("the agent is stopping")

// usable returns the agent that answers, if it takes sessions of this program.
func usable(ctx context.Context, at store.Whereabouts, o StartOptions) (Card, error) {
	c, err := readCard(at.Runtime, o.Launch)
	if err != nil {
		return c, err
	}
	s, err := Ask(ctx, c, true)
	switch {
	case err != nil:
		return c, err
	case s.Stopping != "":
		return c, fmt.Errorf("%w (process %d, with %d sessions: %s)", errStopping, s.PID, len(s.Sessions), s.Stopping)
	}
	if !slices.Contains(s.Protocols, client.Protocol) {
		return c, fmt.Errorf("%w: that of %s (process %d, version %s) speaks protocol versions %v, this program (version %s) speaks [%d]: upgrade the older of the two; when that is the agent, run `ckptstore agent stop --store %s`, and it is started again",
			ErrVersions, at.Name, s.PID, s.Version, s.Protocols, o.Version, client.Protocol, at.Name)
	}
	return c, nil
}

// startAgent starts an agent and waits until it answers. The caller holds the
// start lock.
func startAgent(ctx context.Context, at store.Whereabouts, o StartOptions) (Card, error) {
	path := fileOf(at.Runtime, o.Launch, logFile)
	forgetLogs(at.Runtime)
	if o.Launch == "" {
		wish(at)
	}
	log, err := openLog(path)
	if err != nil {
		return Card{}, err
	}
	defer func() { _ = log.Close() }()
	from, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return Card{}, fmt.Errorf("the agent's log: %w", err)
	}
	cmd := exec.Command(o.Program, append([]string{"agent"}, o.Args...)...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	// A trainer's variables in this environment do not concern the agent, which
	// outlives this process.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains([]string{client.EnvJob, client.EnvSocket, client.EnvToken, client.EnvRPC, EnvStore}, name)
	})
	cmd.Env = append(cmd.Env, EnvStore+"="+at.Location) // not an argument: a URL may have a password, and other users see arguments
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return Card{}, fmt.Errorf("start an agent of %s: %w", at.Name, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		if c, err := readCard(at.Runtime, o.Launch); err == nil && c.PID == cmd.Process.Pid {
			if _, err := Ask(ctx, c, true); err == nil {
				return c, nil
			}
		}
		select {
		case err := <-ended:
			return Card{}, fmt.Errorf("start an agent of %s: it has ended at once: %w: its log, %s, ends with:\n%s", at.Name, cmpErr(err), path, tail(path, from))
		case <-ctx.Done():
			_ = cmd.Process.Kill() // it is useless, and holds the store
			return Card{}, fmt.Errorf("start an agent of %s: it does not answer within %v: its log, %s, ends with:\n%s", at.Name, o.Limit, path, tail(path, from))
		case <-time.After(pollEvery):
		}
	}
}

// wish asks an idle agent of another machine for the store. Without an answer, that agent
// ends after its idle period.
func wish(at store.Whereabouts) {
	dir := joinDir(at.Dir)
	host, err := os.Hostname()
	if err == nil && !store.IsURL(at.Location) && (nodes.Listed(dir) || store.OwnedElsewhere(at.Dir)) {
		_ = nodes.Wish(dir, host) // best effort
	}
}

func cmpErr(err error) error {
	if err == nil {
		return errors.New("exit code 0")
	}
	return err
}

// maxLog is the size in bytes from which an agent's log is rotated.
const maxLog = 1 << 20

// oldLog is the age from which the log of a launch's agent is removed.
const oldLog = 7 * 24 * time.Hour

// forgetLogs removes the logs of followers of old launches.
func forgetLogs(runtime string) {
	logs, _ := filepath.Glob(fileOf(runtime, "*", logFile)) // the pattern is valid
	for _, path := range logs {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > oldLog {
			_ = os.Remove(path) // best effort
		}
	}
}

// openLog opens the log of background agents. A large log is first renamed to
// agent.log.1.
func openLog(path string) (*os.File, error) {
	if info, err := os.Stat(path); err == nil && info.Size() > maxLog {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, fmt.Errorf("the agent's log: %w", err)
		}
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("the agent's log: %w", err)
	}
	return f, nil
}

// maxTail bounds the part of a log that an error quotes, in bytes.
const maxTail = 4 << 10

// tail returns the end of a file's content after an offset.
func tail(path string, from int64) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return "(it cannot be read: " + err.Error() + ")"
	}
	text = text[min(from, int64(len(text))):]
	return string(bytes.TrimSpace(text[max(0, len(text)-maxTail):]))
}

// Find returns the agent of a store, or with a launch the agent that follows in it on this
// machine. It returns [ErrNoAgent] if none answers.
func Find(ctx context.Context, at store.Whereabouts, launch string) (Card, Status, error) {
	c, err := readCard(at.Runtime, launch)
	if errors.Is(err, os.ErrNotExist) {
		return c, Status{}, fmt.Errorf("%w: %s: `ckptstore agent start --store %s` starts one", ErrNoAgent, at.Name, at.Name)
	}
	if err != nil {
		return c, Status{}, err
	}
	s, err := Ask(ctx, c, false)
	if errors.Is(err, errSilent) {
		return c, s, fmt.Errorf("%w: %s: process %d did, and was killed: `ckptstore agent start --store %s` starts another", ErrNoAgent, at.Name, c.PID, at.Name)
	}
	return c, s, err
}

// Ask returns the status of an agent. With use, the agent does not stop as idle
// right now.
func Ask(ctx context.Context, c Card, use bool) (s Status, err error) {
	return s, call(ctx, c, "status", StatusRequest{Use: use}, &s)
}

// Stop asks an agent to stop, and returns its status then; see [Agent.Stop].
func Stop(ctx context.Context, c Card, r StopRequest) (s Status, err error) {
	return s, call(ctx, c, "stop", r, &s)
}

// Gone waits until an agent has ended and released the store.
func Gone(ctx context.Context, c Card) error {
	for {
		if _, err := Ask(ctx, c, false); errors.Is(err, errSilent) {
			lock, err := takeLock(ctx, strings.TrimSuffix(c.Socket, socketFile)+lockFile, time.Hour)
			if err != nil {
				return fmt.Errorf("the agent (process %d) has not ended: %w", c.PID, err)
			}
			return lock.Close()
		}
		select {
		case <-time.After(pollEvery):
		case <-ctx.Done():
			return fmt.Errorf("the agent (process %d) has not ended: %w", c.PID, ctx.Err())
		}
	}
}

// errSilent reports that no process listens on an agent's socket.
var errSilent = errors.New("no process listens")

// call makes one request.
func call(ctx context.Context, c Card, name string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent/v1/"+name, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Authorization", "Bearer "+c.Token)
	var d net.Dialer
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return d.DialContext(ctx, "unix", c.Socket)
	}}
	reply, err := (&http.Client{Transport: transport}).Do(r)
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("ask the agent %s: %w: %w", name, errSilent, err)
	}
	if err != nil {
		return fmt.Errorf("ask the agent %s: %w", name, err)
	}
	defer func() { _ = reply.Body.Close() }()
	if reply.StatusCode != http.StatusOK {
		var p client.Problem
		if err := json.NewDecoder(reply.Body).Decode(&p); err != nil {
			return fmt.Errorf("ask the agent %s: status %d: %w", name, reply.StatusCode, err)
		}
		return fmt.Errorf("ask the agent %s: %s", name, p.Message)
	}
	if err := json.NewDecoder(reply.Body).Decode(out); err != nil {
		return fmt.Errorf("ask the agent %s: %w", name, err)
	}
	return nil
}
