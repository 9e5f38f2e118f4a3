// Package natstest provides a NATS server that is not part of a store, a client that follows no
// rules, and the main function of tests that open stores.
package natstest

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"
)

// Open lets any client do anything in the account that stores are kept in.
const Open = `accounts { ckpt { jetstream: enabled, users: [ { user: any, password: any } ] } }
no_auth_user: any`

// startTime bounds a start.
const startTime = 30 * time.Second

// Start starts a server on loopback over the streams in dir, with a configuration such
// as [Open]. stop returns when it has ended.
func Start(dir, config string) (url string, stop func(), err error) {
	o := &server.Options{}
	if err := o.ProcessConfigString(config); err != nil {
		return "", nil, fmt.Errorf("start a NATS server: %w", err)
	}
	o.Host, o.Port, o.NoSigs, o.NoLog, o.JetStream, o.SyncAlways, o.StoreDir = "127.0.0.1", server.RANDOM_PORT, true, true, true, true, dir
	s, err := server.NewServer(o)
	if err != nil {
		return "", nil, fmt.Errorf("start a NATS server: %w", err)
	}
	s.Start()
	stop = func() {
		s.Shutdown()
		s.WaitForShutdown()
	}
	if !s.ReadyForConnections(startTime) {
		stop()
		return "", nil, errors.New("start a NATS server: it was not ready in time")
	}
	return s.ClientURL(), stop, nil
}

// Peer is a server of a cluster. It exists to run in a process of its own, which a test
// kills: a server that ends in order hands its leaderships over.
type Peer struct {
	Name   string   `json:"name"`
	Dir    string   `json:"dir"`    // of its streams
	Host   string   `json:"host"`   // address of this server
	Client int      `json:"client"` // port for clients
	Route  int      `json:"route"`  // port for the other servers
	Routes []string `json:"routes"` // HOST:PORT of all servers, with this one
	Config string   `json:"config"` // such as [Open]; "" lets any client use the global account
	Watch  string   `json:"watch"`  // stream of the global account, whose state here ServePeer prints; "" for none
}

// URL returns where clients connect.
func (p Peer) URL() string {
	return "nats://" + net.JoinHostPort(p.Host, strconv.Itoa(p.Client))
}

// Peers returns the servers of a cluster of n on one address, with free ports and each
// with a directory below dir.
func Peers(n int, host string, dir func(name string) string) (all []Peer, err error) {
	var held []net.Listener
	defer func() {
		for _, l := range held {
			err = errors.Join(err, l.Close())
		}
	}()
	free := func() int {
		l, lerr := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if lerr != nil {
			err = errors.Join(err, lerr)
			return 0
		}
		held = append(held, l)
		return l.Addr().(*net.TCPAddr).Port
	}
	var routes []string
	for i := range n {
		p := Peer{Name: fmt.Sprint("n", i), Host: host, Client: free(), Route: free()}
		p.Dir = dir(p.Name)
		routes = append(routes, net.JoinHostPort(host, strconv.Itoa(p.Route)))
		all = append(all, p)
	}
	for i := range all {
		all[i].Routes = routes
	}
	return all, err
}

// Text returns the peer in the form that [ServePeer] takes.
func (p Peer) Text() string {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // a struct of texts and numbers
	}
	return string(text)
}

// The states of a stream on a server, as [Peer.Watch] prints them.
const (
	Leads   = "stream: leads"   // and the others' copies may be behind
	Current = "stream: current" // follows, and has what the leader has
	Behind  = "stream: behind"  // or without a leader
)

// report prints the state of the watched stream when it changes, until the process ends.
func (p Peer) report(s *server.Server, out io.Writer) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for was := ""; ; <-tick.C {
		now := Behind
		switch {
		case s.JetStreamIsStreamLeader(server.DEFAULT_GLOBAL_ACCOUNT, p.Watch):
			now = Leads
		case s.JetStreamIsStreamCurrent(server.DEFAULT_GLOBAL_ACCOUNT, p.Watch):
			now = Current
		}
		if now == was {
			continue
		}
		if _, err := fmt.Fprintln(out, now); err != nil {
			return
		}
		was = now
	}
}

// ServePeer runs the server that a text describes until in ends. It prints the URL for
// clients once they can connect; the cluster may have no leader then.
func ServePeer(text string, in io.Reader, out io.Writer) error {
	var p Peer
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return fmt.Errorf("serve a peer: %w", err)
	}
	o := &server.Options{}
	if err := o.ProcessConfigString(cmp.Or(p.Config, "no_sys_acc: false")); err != nil {
		return fmt.Errorf("serve peer %s: %w", p.Name, err)
	}
	o.ServerName, o.Host, o.Port, o.NoSigs, o.NoLog = p.Name, p.Host, p.Client, true, true
	o.JetStream, o.StoreDir, o.SyncAlways = true, p.Dir, true
	o.Cluster = server.ClusterOpts{Name: "ckpt", Host: p.Host, Port: p.Route}
	for _, route := range p.Routes {
		o.Routes = append(o.Routes, &url.URL{Scheme: "nats", Host: route})
	}
	s, err := server.NewServer(o)
	if err != nil {
		return fmt.Errorf("serve peer %s: %w", p.Name, err)
	}
	s.Start()
	defer s.Shutdown()
	if !s.ReadyForConnections(startTime) {
		return fmt.Errorf("serve peer %s: it was not ready in time", p.Name)
	}
	if _, err := fmt.Fprintln(out, p.URL()); err != nil {
		return err
	}
	if p.Watch != "" {
		go p.report(s, out)
	}
	_, err = io.Copy(io.Discard, in)
	return err
}

// Main runs the tests of a package that opens stores, and ends the process. It gives them a runtime
// directory of their own, with a path that is short enough for sockets. The tests fail if
// goroutines outlive them, except those of [Leftovers].
func Main(m goleak.TestingM) {
	dir, err := os.MkdirTemp("", "ck")
	if err == nil {
		err = os.Setenv("XDG_RUNTIME_DIR", dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, append(Leftovers(), RemoveAndExit(dir))...)
}

// Leftovers are goroutines that a server may leave: a server that is shut down while it creates a
// stream leaves the loop of that stream's files, and with it the ticker of its clock. A server that
// was not shut down has others.
func Leftovers() []goleak.Option {
	return []goleak.Option{
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
	}
}

// RemoveAndExit ends the process after its tests: it removes their directory, and exits with the
// tests' code, or with 1 if the directory stays.
func RemoveAndExit(dir string) goleak.Option {
	return goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(dir); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		os.Exit(code)
	})
}
