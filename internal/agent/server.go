package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/peer"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
)

// maxBody bounds the body of a request to the agent itself, in bytes.
const maxBody = 16 << 20

// server is the agent's socket.
type server struct {
	http *http.Server
	done chan error
}

// listen opens the agent's socket. The caller holds the agent's lock, so an
// existing socket belongs to a dead agent.
func (a *Agent) listen() (*server, error) {
	path := fileOf(a.at.Runtime, a.launch(), socketFile)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("open the agent's socket: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("open the agent's socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("open the agent's socket: %w", err), l.Close())
	}
	a.card = Card{Socket: path, Token: rand.Text(), PID: os.Getpid(), Store: a.at.ID, Protocols: []int{client.Protocol}, Version: a.cfg.Version}
	s := &server{done: make(chan error, 1), http: &http.Server{
		Handler: a.handler(), ReadHeaderTimeout: 30 * time.Second,
		ConnContext: peer.Context,
	}}
	go func() { s.done <- s.http.Serve(l) }()
	if err := publish(a.at.Runtime, a.launch(), a.card); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// replyLimit is how long the last replies may take, such as that to the stop
// request.
const replyLimit = 2 * time.Second

// close ends the server and removes its socket. It cuts off requests that last
// longer than a reply takes.
func (s *server) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), replyLimit)
	defer cancel()
	err := s.http.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = s.http.Close()
	}
	if serr := <-s.done; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	return err
}

func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("POST /v1/join", httpkit.Handle(maxBody, a.onJoin))
	mux.Handle("POST /v1/launch", httpkit.Handle(maxBody, a.onLaunch))
	mux.Handle("POST /v1/status", httpkit.Handle(maxBody, a.onStatus))
	mux.Handle("POST /v1/stop", httpkit.Handle(maxBody, a.onStop))
	mux.HandleFunc("POST "+session.ServicePath, func(w http.ResponseWriter, r *http.Request) {
		defer a.begin()()
		if a.cfg.Services == nil {
			httpkit.Refuse(w, problem.Errorf(problem.NotFound, "this agent has no requests about the store: upgrade it, and run `ckptstore agent stop`"))
			return
		}
		a.cfg.Services.ServeHTTP(w, r)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		httpkit.Refuse(w, problem.Errorf(problem.NotFound, "no request %s %s: an agent has join, status, stop and those below %s; what else a rank asks goes to the socket that join gives it", r.Method, r.URL.Path, session.ServicePath))
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !httpkit.Authorized(r, a.card.Token) {
			httpkit.Refuse(w, problem.Errorf(problem.Unauthorized, "wrong token: it is in %s, and another agent's is another", fileOf(a.at.Runtime, a.launch(), cardFile)))
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// speaks refuses a client that does not speak the agent's protocol version.
func (a *Agent) speaks(protocols []int) error {
	if slices.Contains(protocols, client.Protocol) {
		return nil
	}
	return problem.Errorf(problem.Invalid, "this process speaks protocol versions %v, the agent (process %d, version %s) speaks %v: upgrade the older of the two; when that is the agent, run `ckptstore agent stop --store %s` after it",
		protocols, a.card.PID, a.cfg.Version, a.card.Protocols, a.at.Location)
}

// StatusRequest asks for the status of an agent.
type StatusRequest struct {
	Use bool `json:"use,omitempty"` // the agent is about to be used, so it must not stop as idle now
}

// Status is the state of an agent.
type Status struct {
	PID       int             `json:"pid"`
	Version   string          `json:"version"`
	Protocols []int           `json:"protocols"`
	Store     string          `json:"store"`
	Location  string          `json:"location"`
	Stopping  string          `json:"stopping,omitempty"` // why no more sessions are taken
	Busy      string          `json:"busy,omitempty"`     // what other than sessions keeps it from stopping
	Sessions  []SessionStatus `json:"sessions"`
	// Launches are the keys of the launches over several machines that it coordinates.
	Launches []string `json:"launches,omitempty"`
	// Follows is the host of the agent that it follows in one launch.
	Follows string `json:"follows,omitempty"`
}

// SessionStatus is the state of one group of processes at an agent.
type SessionStatus struct {
	Run       string `json:"run"`
	Trial     string `json:"trial"`
	Job       string `json:"job,omitempty"`
	Attempt   int    `json:"attempt,omitempty"`
	State     string `json:"state"` // joining, running or ending
	WorldSize int    `json:"world_size"`
	PIDs      []int  `json:"pids"` // of the members that have not left
}

func (a *Agent) onStatus(_ context.Context, r StatusRequest) (Status, error) {
	if r.Use {
		defer a.begin()()
	}
	return a.status(), nil
}

func (a *Agent) status() Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := Status{
		PID: a.card.PID, Version: a.cfg.Version, Protocols: a.card.Protocols, Store: a.at.ID, Location: a.at.Location,
		Stopping: a.stopping, Sessions: []SessionStatus{},
	}
	if a.cfg.Busy != nil {
		s.Busy = a.cfg.Busy()
	}
	if a.machines != nil {
		s.Launches = slices.Sorted(maps.Keys(a.machines.launches))
	}
	if a.link != nil {
		s.Follows = a.link.Host()
	}
	for _, g := range a.groups {
		s.Sessions = append(s.Sessions, g.status())
	}
	slices.SortFunc(s.Sessions, func(x, y SessionStatus) int { return slices.Compare(x.PIDs, y.PIDs) })
	return s
}

// StopRequest asks an agent to stop.
type StopRequest struct {
	Now    bool   `json:"now,omitempty"` // its sessions are ended; what they have staged is finished
	Reason string `json:"reason,omitempty"`
}

func (a *Agent) onStop(_ context.Context, r StopRequest) (Status, error) {
	if r.Reason == "" {
		r.Reason = "asked for, without a reason"
	}
	a.Stop(r.Reason, r.Now)
	return a.status(), nil
}
