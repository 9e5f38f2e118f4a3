package logpeers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/ckptstore/ckptstore/internal/claim"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// generations is STORE/join/log/copies.json: how often each copy was replaced. A copy of an earlier
// generation, on the disk of a node that came back, is not served: two copies of one index would
// vote twice.
type generations [Copies]int

func generationsPath(store string) string { return filepath.Join(joinDir(store), "copies.json") }

func readGenerations(store string) (g generations, err error) {
	text, err := os.ReadFile(generationsPath(store))
	if errors.Is(err, fs.ErrNotExist) {
		return g, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &g)
	}
	if err != nil {
		return g, fmt.Errorf("read %s: %w", generationsPath(store), err)
	}
	return g, nil
}

// identity returns what the directory of a copy must have now.
func (s *secret) identity(store string, index int) (copyID, error) {
	g, err := readGenerations(store)
	id := s.copy(index)
	id.Generation = g[index]
	return id, err
}

// ErrCopyThere reports that a copy that was to be replaced is there.
var ErrCopyThere = problem.New(problem.Conflict, "the copy of the log is there")

// replaceTime bounds the filling of a copy from the others.
const replaceTime = 10 * time.Minute

// Replace makes copy k of the log again, in the store's directory, from the two others. It does so
// while no job and no command uses the log, and only once the two agree on every term and entry: the
// lost copy may have voted and acknowledged, and a majority with the new one must know all of that.
// No peer is removed from the cluster. A copy that a process serves is not replaced, wherever it lies. Then it raises the copy's generation, so that the old one is
// refused wherever it comes back. Both other copies must lie in the store. wait bounds the wait for
// a process that is ending.
//
// If it is interrupted, the next call or the next job fills the copy further.
func Replace(ctx context.Context, store string, k int, wait time.Duration, log *slog.Logger) (err error) {
	if k < 0 || k >= Copies {
		return problem.Errorf(problem.Invalid, "replace copy %d of the log: want 0 to %d", k, Copies-1)
	}
	failed := func(err error) error { return fmt.Errorf("replace copy %d of the log of %s: %w", k, store, err) }
	s, err := readSecret(store)
	if err != nil {
		return failed(err)
	}
	r := &replacement{store: store, k: k, secret: s, log: log}
	if err := r.missing(); err != nil {
		return failed(err)
	}
	defer func() { err = errors.Join(err, r.close()) }()
	var without []error
	if r.held, without = holdCopies(ctx, store, s, wait, log, k); len(without) > 0 {
		return failed(problem.Wrap(problem.Locked, fmt.Errorf("both other copies must be in the store, and no job may use them: %w", errors.Join(without...))))
	}
	limit, cancel := context.WithTimeout(ctx, replaceTime)
	defer cancel()
	if err := r.startOthers(limit); err != nil {
		return failed(err)
	}
	if err := r.await(limit, "the two other copies do not agree"); err != nil {
		return failed(err)
	}
	if err := r.startNew(limit, wait); err != nil {
		return failed(err)
	}
	if err := r.await(limit, "the new copy has not caught up"); err != nil {
		return failed(err)
	}
	if err := durableRemove(filepath.Join(CopyDir(store, k), fillingName)); err != nil {
		return failed(err)
	}
	log.Info("copy of the log replaced", "copy", k, "dir", CopyDir(store, k))
	return nil
}

// fillingName is the file in the directory of a copy that [Replace] has made and that has not caught up
// with the others yet. The peer that serves the copy removes it then.
const fillingName = "filling"

// isFilling reports whether a directory has a copy that has not caught up yet.
func isFilling(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, fillingName))
	return err == nil
}

// durableRemove removes a file if it is there.
func durableRemove(path string) error {
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, durable.SyncDir(filepath.Dir(path)))
}

// replacement is one call of [Replace].
type replacement struct {
	store  string
	k      int
	secret *secret
	log    *slog.Logger
	held   [Copies]*hold // not yet served
	cards  [Copies]*card
	peers  []*Peer
}

func (r *replacement) startOthers(ctx context.Context) error {
	for j, h := range r.held {
		c, err := newCard("127.0.0.1")
		if err != nil {
			return err
		}
		if h != nil {
			r.cards[j] = &c
		}
	}
	for j, h := range r.held {
		if h == nil {
			continue
		}
		if err := r.serve(ctx, j, h); err != nil {
			return err
		}
	}
	return nil
}

func (r *replacement) serve(ctx context.Context, j int, h *hold) error {
	p, err := startPeer(ctx, j, h, r.cards, r.secret, r.log)
	if err != nil {
		return fmt.Errorf("serve copy %d: %w", j, err)
	}
	r.peers, r.held[j] = append(r.peers, p), nil
	return nil
}

// startNew serves the empty copy. Its generation is durable before it can vote, and is raised only
// while this process holds the directory and no process serves the copy elsewhere.
func (r *replacement) startNew(ctx context.Context, wait time.Duration) error {
	if err := r.unserved(); err != nil {
		return err
	}
	dir := CopyDir(r.store, r.k)
	locking, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	h, err := lockCopy(locking, dir, r.secret.copy(r.k), false)
	if err != nil {
		return problem.Wrap(problem.Locked, err)
	}
	r.held[r.k] = h
	if h.claim, err = claim.Take(ctx, dir, r.log); err != nil {
		return err
	}
	if err := r.missing(); err != nil {
		return err
	}
	if !hasCopy(dir) {
		if err := r.raise(dir); err != nil {
			return err
		}
	}
	if h.copy, err = r.secret.identity(r.store, r.k); err != nil {
		return err
	}
	if err := h.copy.identify(dir, false); err != nil {
		return err
	}
	if err := durable.Write(filepath.Join(dir, fillingName), nil); err != nil {
		return err
	}
	c, err := newCard("127.0.0.1")
	if err != nil {
		return err
	}
	r.cards[r.k] = &c
	return r.serve(ctx, r.k, h)
}

// missing returns [ErrCopyThere] if the store has the copy, unless a replacement was interrupted.
func (r *replacement) missing() error {
	dir := CopyDir(r.store, r.k)
	if !hasCopy(dir) || isFilling(dir) {
		return nil
	}
	return fmt.Errorf("%w: %s: the next job serves it", ErrCopyThere, dir)
}

// unserved returns an error if a process serves the copy for which a new one is made, in whatever directory:
// two copies of one index would vote. The card of the copy may be that of a process that has ended. A node
// that does not answer counts as off.
func (r *replacement) unserved() error {
	all, err := cards(r.store)
	if err != nil {
		return err
	}
	c := all[r.k]
	if c == nil {
		return nil
	}
	at := access([]*card{c}, r.secret)
	conn, err := nats.Connect(at.URL, nats.Token(at.Token), nats.Secure(at.TLS), nats.Timeout(reachTime))
	if err != nil {
		return nil //nolint:nilerr // none of this log's servers answers there
	}
	conn.Close()
	return problem.Errorf(problem.Locked, "process %d on %s serves the copy, so it is not lost; to replace it anyway, end that trainer", c.PID, c.Host)
}

// raise makes the copy's generation durable, and removes what an earlier call has left in its directory
// before it served the copy.
func (r *replacement) raise(dir string) error {
	g, err := readGenerations(r.store)
	if err != nil {
		return err
	}
	g[r.k]++
	text, err := json.Marshal(g)
	if err != nil {
		return err
	}
	if err := durable.Write(generationsPath(r.store), append(text, '\n')); err != nil {
		return err
	}
	return errors.Join(durableRemove(filepath.Join(dir, copyName)), durableRemove(filepath.Join(dir, fillingName)))
}

// await waits until all served copies are settled and have the same logs of every group.
func (r *replacement) await(ctx context.Context, lacks string) error {
	for {
		settled := true
		for _, p := range r.peers {
			settled = settled && p.settled()
		}
		if settled && sameGroups(r.peers) {
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return problem.Wrap(problem.Unavailable, fmt.Errorf("%s: %w", lacks, context.Cause(ctx)))
		}
	}
}

func (r *replacement) close() error {
	for _, p := range r.peers {
		p.Close()
	}
	var err error
	for _, h := range r.held {
		if h != nil {
			err = errors.Join(err, h.release())
		}
	}
	return err
}

// position is how far a server is in the log of a Raft group.
type position struct{ term, lastTerm, last, committed, applied uint64 }

// sameGroups reports whether servers agree on all Raft groups.
func sameGroups(peers []*Peer) bool {
	all := make([]map[string]position, len(peers))
	for i, p := range peers {
		all[i] = positions(p.server())
	}
	return agree(all)
}

// agree reports whether servers have the same entries of every group that any of them has, in the
// same term, all of them committed and applied. A vote of the lost copy in an earlier term, and an
// entry that it has acknowledged, are without effect then.
func agree(all []map[string]position) bool {
	for _, one := range all {
		if len(one) == 0 || len(one) != len(all[0]) {
			return false
		}
	}
	for group, want := range all[0] {
		if want.committed != want.last || want.applied != want.last {
			return false
		}
		for _, others := range all[1:] {
			if others[group] != want {
				return false
			}
		}
	}
	return true
}

// positions returns how far a server is in each group; nil while one of them has no leader or is
// catching up.
func positions(ns *server.Server) map[string]position {
	at := map[string]position{}
	for _, of := range []string{"SYS", account} {
		status := ns.Raftz(&server.RaftzOptions{AccountFilter: of})
		if status == nil {
			continue
		}
		for _, groups := range *status {
			for name, g := range groups {
				if g.Leader == "" || g.CatchingUp {
					return nil
				}
				at[of+"/"+name] = position{g.Term, g.PTerm, g.PIndex, g.Committed, g.Applied}
			}
		}
	}
	return at
}
