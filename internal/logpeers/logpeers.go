// Package logpeers keeps the log of a store in three copies. The trainers of the first
// three nodes of a job are its peers: each runs a server with one copy, and the three are
// one JetStream cluster. The log answers as long as two of them do.
//
//	copy     the files of one peer, in a directory of its own
//	card     where a peer is: addresses for clients and for the other peers
//	secret   what peers and clients show and verify: a token and a certificate
//
//	STORE/join/log/secret.json   the secret; only the user of the job can read it
//	STORE/join/log/<k>.json      the card of peer k
//	STORE/join/log/copies.json   how often each copy was replaced
//	STORE/log.<k>/               the copy of peer k, unless a node has its own directory
//
// A copy that was lost never comes back as an empty one: it would vote without what it had
// acknowledged. Two processes never serve one copy: its directory is locked and claimed.
package logpeers

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/share"
)

// Copies is the number of peers.
const Copies = 3

// Config describes this process's part in the log of a store.
type Config struct {
	Store   string // directory that all nodes share
	Formed  bool   // the store has a log: two peers suffice, and no copy may be empty
	Index   int    // of this node; from [Copies] on, it has no copy
	Dir     string // of this node's copy; "" for STORE/log.<index>
	Address string // numeric, where the other nodes reach this one
	Wait    time.Duration
	Logger  *slog.Logger
}

// Access is how a client reaches the log.
type Access struct {
	URL   string // of all peers
	Token string
	TLS   *tls.Config
}

// card is STORE/join/log/<k>.json.
type card struct {
	Host   string `json:"host"` // for messages
	PID    int    `json:"pid"`
	Client string `json:"client"` // HOST:PORT
	Route  string `json:"route"`  // HOST:PORT
}

func joinDir(store string) string { return filepath.Join(store, "join", "log") }

func cardPath(store string, k int) string {
	return filepath.Join(joinDir(store), strconv.Itoa(k)+".json")
}

// cards returns the cards of the peers; nil for a peer without one.
func cards(store string) (all [Copies]*card, err error) {
	// Listing asks the server of a network filesystem for new names.
	if _, err := os.ReadDir(joinDir(store)); err != nil {
		return all, err
	}
	for k := range all {
		text, err := os.ReadFile(cardPath(store, k))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return all, err
		}
		all[k] = &card{}
		if err := json.Unmarshal(text, all[k]); err != nil {
			return all, fmt.Errorf("read %s: %w", cardPath(store, k), err)
		}
	}
	return all, nil
}

func access(all []*card, s *secret) Access {
	var urls []string
	for _, c := range all {
		if c != nil {
			urls = append(urls, "tls://"+c.Client)
		}
	}
	return Access{URL: strings.Join(urls, ","), Token: s.Token, TLS: s.client()}
}

// Replicated reports whether the log of the store in a directory has peers. It looks no name up
// that is not listed: most stores have no such directory, and a network filesystem would remember
// for a while that it is missing, also after a job has made it on another node.
func Replicated(store string) bool {
	dir := store
	for _, name := range []string{"join", "log", "secret.json"} {
		entries, err := os.ReadDir(dir)
		if err != nil || !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == name }) {
			return false
		}
		dir = filepath.Join(dir, name)
	}
	return true
}

// reachTime bounds the search for peers that answer. Those of a job that has ended may be on nodes
// that are off, where nothing refuses a connection.
const reachTime = 2 * time.Second

// Find returns how to reach the peers of the log, a peer that accepts connections first. If none
// does, its error has the kind [problem.Unavailable].
func Find(ctx context.Context, store string) (Access, error) {
	s, err := readSecret(store)
	if err != nil {
		return Access{}, fmt.Errorf("find the log's peers: %w", err)
	}
	all, err := cards(store)
	if err != nil {
		return Access{}, fmt.Errorf("find the log's peers: %w", err)
	}
	first := reach(ctx, all)
	if first < 0 {
		return Access{}, problem.Errorf(problem.Unavailable, "find the log's peers: none of those in %s answers: start the job on its first %d nodes", joinDir(store), Copies)
	}
	inOrder := []*card{all[first]}
	return access(append(inOrder, slices.Delete(all[:], first, first+1)...), s), nil
}

// reach returns the first peer that accepts a connection; -1 if none does.
func reach(ctx context.Context, all [Copies]*card) int {
	ctx, cancel := context.WithTimeout(ctx, reachTime)
	defer cancel()
	answers := make(chan int, Copies)
	for k, c := range all {
		go func() {
			if c != nil {
				if conn, err := new(net.Dialer).DialContext(ctx, "tcp", c.Client); err == nil {
					_ = conn.Close() // it has shown what it could
					answers <- k
					return
				}
			}
			answers <- -1
		}()
	}
	for range all {
		if k := <-answers; k >= 0 {
			return k
		}
	}
	return -1
}

// pollCards is the pause between looks at the cards of the other peers.
const pollCards = 200 * time.Millisecond

// Join takes this node's part in the log: it serves its copy, if it has one, until the
// caller closes the peer, and returns when two peers agree. A node without a copy gets a
// nil peer as soon as there are two cards. After c.Wait, Join returns an error with the
// kind [problem.Unavailable].
func Join(ctx context.Context, c Config) (_ *Peer, _ Access, err error) {
	limit, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	if err := share.MkdirAll(joinDir(c.Store), 0o700); err != nil {
		return nil, Access{}, fmt.Errorf("join the log's peers: %w", err)
	}
	s, err := sharedSecret(c.Store)
	if err != nil {
		return nil, Access{}, fmt.Errorf("join the log's peers: %w", err)
	}
	f := &formation{Config: c, secret: s}
	defer func() {
		switch {
		case err == nil:
		case f.peer != nil:
			f.peer.Close()
		case f.held != nil:
			err = errors.Join(err, f.held.release())
		}
	}()
	if c.Index < Copies {
		if err := f.enter(limit); err != nil {
			return nil, Access{}, fmt.Errorf("serve copy %d of the log: %w", c.Index, f.late(ctx, limit, err))
		}
	}
	for {
		all, err := cards(c.Store)
		if err != nil {
			return nil, Access{}, fmt.Errorf("join the log's peers: %w", err)
		}
		if done, err := f.step(limit, all); err != nil {
			return nil, Access{}, fmt.Errorf("serve copy %d of the log: %w", c.Index, err)
		} else if done {
			return f.peer, access(all[:], s), nil
		}
		select {
		case <-time.After(pollCards):
		case <-limit.Done():
			return nil, Access{}, f.late(ctx, limit, fmt.Errorf("join the log's peers: %s", f.lacks(all)))
		}
	}
}

// formation is one call of [Join].
type formation struct {
	Config
	secret *secret
	held   *hold         // of the copy's directory
	peer   *Peer         // nil while it has not started
	with   [Copies]*card // that it started with
}

// enter locks this node's copy and leaves its card.
func (f *formation) enter(ctx context.Context) error {
	if f.Dir == "" {
		f.Dir = CopyDir(f.Store, f.Index)
	}
	id, err := f.secret.identity(f.Store, f.Index)
	if err != nil {
		return err
	}
	if f.held, err = holdCopy(ctx, f.Dir, id, f.Formed, f.Wait, f.Logger); err != nil {
		return err
	}
	return f.leaveCard()
}

// leaveCard leaves a card with free ports for this node.
func (f *formation) leaveCard() error {
	mine, err := newCard(f.Address)
	if err != nil {
		return err
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	return durable.Write(cardPath(f.Store, f.Index), text)
}

// step starts or restarts the server when the cards have changed, and reports whether the
// peers agree.
func (f *formation) step(ctx context.Context, all [Copies]*card) (agree bool, err error) {
	count := 0
	for _, c := range all {
		if c != nil {
			count++
		}
	}
	if f.Index >= Copies {
		return count >= Copies/2+1, nil
	}
	if count < Copies && !f.Formed {
		return false, nil
	}
	if f.peer != nil && f.peer.current() {
		return true, nil
	}
	if f.peer != nil && sameCards(f.with, all) {
		return false, nil
	}
	if f.peer != nil {
		f.peer.stop()
	}
	f.peer, err = startPeer(ctx, f.Index, f.held, all, f.secret, f.Logger)
	if errors.Is(err, syscall.EADDRINUSE) {
		f.Logger.Warn("copy of the log takes other ports", "copy", f.Index, "error", err)
		return false, f.leaveCard() // the others see it and start again
	}
	f.with = all
	return false, err
}

func sameCards(a, b [Copies]*card) bool {
	for k := range a {
		if (a[k] == nil) != (b[k] == nil) || a[k] != nil && *a[k] != *b[k] {
			return false
		}
	}
	return true
}

// lacks describes what the peers wait for.
func (f *formation) lacks(all [Copies]*card) string {
	var without []string
	for k, c := range all {
		if c == nil {
			without = append(without, strconv.Itoa(k))
		}
	}
	if len(without) > 0 && (!f.Formed || len(without) > 1) {
		return fmt.Sprintf("no trainer has come for the copies %s of the log: start the job with --node-rank 0 to %d on three nodes", strings.Join(without, ", "), Copies-1)
	}
	return "fewer than two copies of the log are served: start the trainers of the nodes that have them"
}

// late gives an error that the end of the wait has caused its kind.
func (f *formation) late(ctx, limit context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if limit.Err() != nil {
		return problem.Wrap(problem.Unavailable, fmt.Errorf("%w (waited %v)", err, f.Wait))
	}
	return err
}

// CopyDir returns the directory of a copy that lies in the store.
func CopyDir(store string, k int) string { return filepath.Join(store, "log."+strconv.Itoa(k)) }

// newCard describes a peer at an address, with free ports. Another process may take one of them
// before the server starts.
func newCard(address string) (card, error) {
	host, err := os.Hostname()
	if err != nil {
		return card{}, err
	}
	c := card{Host: host, PID: os.Getpid()}
	for _, to := range []*string{&c.Client, &c.Route} {
		l, err := listenAside(address)
		if err != nil {
			return c, fmt.Errorf("listen on %s: %w; name an address of this node by --local-addr", address, err)
		}
		defer func() { _ = l.Close() }() // it only chose the port
		*to = l.Addr().String()
	}
	return c, nil
}

// firstPort is the lowest port that a peer chooses.
const firstPort = 15000

// listenAside listens on a free port from which the system makes no outgoing connections: between
// the choice of a port and the start of the server on it, such a connection would take it.
func listenAside(address string) (net.Listener, error) {
	end := 32768 // of Linux, unless it was changed
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		_, _ = fmt.Sscan(string(text), &end) // else the usual one
	}
	for range 100 {
		if end <= firstPort {
			break
		}
		l, err := net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(firstPort+rand.IntN(end-firstPort))))
		if !errors.Is(err, syscall.EADDRINUSE) {
			return l, err
		}
	}
	return net.Listen("tcp", net.JoinHostPort(address, "0"))
}
