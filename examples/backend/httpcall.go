package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/client/collective"
	"github.com/ckptstore/ckptstore/client/rpc"
)

// httpCall is the name of an RPC backend whose agents call each other by HTTP.
const httpCall = "HTTP"

// maxBody is the maximum size of a call, and of its answer, in bytes.
const maxBody = 16 << 20

// register returns a registry with the built-in backends and this backend.
func register() (*rpc.Registry, error) {
	r := rpc.NewRegistry()
	_, err := r.Register(httpCall, rpc.Handlers{Construct: httpOptionsOf, Owns: ownsHTTP, Init: openHTTP})
	return r, err
}

// httpOptions are the settings of an agent.
type httpOptions struct{ timeout time.Duration }

func httpOptionsOf(s rpc.Settings) (_ rpc.Options, unknown []string, err error) {
	o := &httpOptions{timeout: time.Minute}
	for name, v := range s {
		seconds, ok := v.(float64)
		timeout := time.Duration(seconds * float64(time.Second))
		switch {
		case name != "timeout":
			unknown = append(unknown, name)
		case !ok:
			return nil, nil, fmt.Errorf("timeout is a %T; give seconds", v)
		case timeout <= 0:
			return nil, nil, fmt.Errorf("timeout is %v; give seconds, more than 0", v)
		default:
			o.timeout = timeout
		}
	}
	return o, unknown, nil
}

func ownsHTTP(o rpc.Options) bool {
	_, ok := o.(*httpOptions)
	return ok
}

// httpAgent serves the functions of one worker on a loopback address.
type httpAgent struct {
	self   rpc.Peer
	group  *collective.Group
	token  string
	limit  time.Duration
	server *http.Server
	served chan error
	peers  map[string]address

	mu    sync.Mutex
	funcs map[string]rpc.Func
}

// address is where a peer listens. The ranks gather the addresses of all.
type address struct {
	Peer rpc.Peer
	At   string
}

var _ rpc.Agent = (*httpAgent)(nil)

// openHTTP opens the agent of one rank. Every rank calls it.
func openHTTP(ctx context.Context, s rpc.Setup) (rpc.Agent, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	a := &httpAgent{
		self: rpc.Peer{Name: s.Name, Rank: s.Rank}, group: s.Group, token: s.Token, limit: s.Options.(*httpOptions).timeout,
		served: make(chan error, 1), peers: map[string]address{}, funcs: map[string]rpc.Func{},
	}
	a.server = &http.Server{Handler: http.HandlerFunc(a.serve), ReadHeaderTimeout: a.limit}
	go func() { a.served <- a.server.Serve(l) }()
	all, err := collective.AllGather(ctx, s.Group, address{a.self, l.Addr().String()})
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	for _, peer := range all {
		a.peers[peer.Peer.Name] = peer
	}
	return a, nil
}

// Self returns this agent's name and rank.
func (a *httpAgent) Self() rpc.Peer { return a.self }

// Handle registers a function that peers call.
func (a *httpAgent) Handle(name string, f rpc.Func) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.funcs[name] != nil {
		return fmt.Errorf("handle %s: the name is taken", name)
	}
	a.funcs[name] = f
	return nil
}

// serve runs the function that a peer calls.
func (a *httpAgent) serve(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	f := a.funcs[r.URL.Query().Get("function")]
	a.mu.Unlock()
	if r.Header.Get("Authorization") != "Bearer "+a.token {
		http.Error(w, "not a rank of this group", http.StatusForbidden)
		return
	}
	if f == nil {
		http.Error(w, "no such function", http.StatusNotFound)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		body, err = f(r.Context(), body)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(body) // a caller that has gone gets its own error
}

// Call runs a function of a peer.
func (a *httpAgent) Call(ctx context.Context, to, function string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, a.limit)
	defer cancel()
	peer, known := a.peers[to]
	fail := func(err error) ([]byte, error) {
		return nil, &rpc.PeerError{Peer: rpc.Peer{Name: to, Rank: peer.Peer.Rank}, Function: function, Err: err}
	}
	if !known {
		return fail(errors.New("no such peer"))
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+peer.At+"/?function="+url.QueryEscape(function), bytes.NewReader(body))
	if err != nil {
		return fail(err)
	}
	r.Header.Set("Authorization", "Bearer "+a.token)
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return fail(err)
	}
	defer reply.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(reply.Body, maxBody+1))
	if err == nil && len(answer) > maxBody {
		err = fmt.Errorf("the answer has more than %d bytes; return less in a call", maxBody)
	}
	if err != nil {
		return fail(err)
	}
	if reply.StatusCode != http.StatusOK {
		return nil, &rpc.RemoteError{Peer: peer.Peer, Function: function, Message: string(bytes.TrimSpace(answer))}
	}
	return answer, nil
}

// Shutdown waits until every rank has made its last call, and closes.
func (a *httpAgent) Shutdown(ctx context.Context) error {
	_, err := a.group.AllGatherBytes(ctx, nil)
	return errors.Join(err, a.Close())
}

// Close ends the server.
func (a *httpAgent) Close() error {
	err := a.server.Close()
	if served := <-a.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	a.served <- http.ErrServerClosed
	return err
}
