package nodes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/internal/claim"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Invitation is DIR/NAME.json: where the endpoint of a job is. It exists for agents that
// know only a name, such as that of a launch, and no endpoint. It is no secret: the
// credentials of the job decide whom the agents trust.
type Invitation struct {
	Job       string   `json:"job"`
	Host      string   `json:"host"`      // of the coordinator, for messages
	Addresses []string `json:"addresses"` // HOST:PORT, the likeliest first
}

// Invite makes the endpoint known under a name, in the directory of its credentials. The
// caller removes the file by [Endpoint.Disinvite].
func (e *Endpoint) Invite(name string, addresses []string) error {
	if e.c.Dir == "" || !jobName.MatchString(name) {
		return problem.Errorf(problem.Invalid, "invite nodes by the name %q in %q: give a shared directory, and a name of letters, digits, '.', '_' and '-'", name, e.c.Dir)
	}
	i := Invitation{Job: e.c.Job, Host: e.c.Self.Host}
	_, port, err := net.SplitHostPort(e.listener.Addr().String())
	if err != nil {
		return fmt.Errorf("invite nodes: %w", err)
	}
	for _, a := range addresses {
		i.Addresses = append(i.Addresses, net.JoinHostPort(a, port))
	}
	if err := writeSecret(e.c.Dir, name, i); err != nil {
		return fmt.Errorf("invite nodes: %w", err)
	}
	return nil
}

// Disinvite removes the file of [Endpoint.Invite], unless it is another endpoint's by now.
func (e *Endpoint) Disinvite(name string) error {
	i, err := readInvitation(e.c.Dir, name)
	if err != nil || i.Job != e.c.Job {
		return nil
	}
	if err := os.Remove(credentialsPath(e.c.Dir, name)); err != nil && !absent(err) {
		return fmt.Errorf("withdraw an invitation: %w", err)
	}
	return nil
}

func readInvitation(dir, name string) (i Invitation, err error) {
	data, err := readSecret(dir, name)
	if err != nil {
		return i, err
	}
	if err = json.Unmarshal(data, &i); err != nil {
		return i, fmt.Errorf("read %s: %w", credentialsPath(dir, name), err)
	}
	return i, nil
}

// Listed reports whether a path exists, as the servers of its directories know it. It
// looks no name up that is not listed: a network file system remembers for a while that
// a name did not exist.
func Listed(path string) bool {
	dir, name := filepath.Split(filepath.Clean(path))
	dir = filepath.Clean(dir)
	if name == "" {
		return true
	}
	names, err := list(dir)
	return err == nil && slices.Contains(names, name)
}

func list(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }() // it was only read
	return d.Readdirnames(-1)
}

// Invited returns the invitation of a name in a directory that another machine may have
// written to; false while there is none. dir is below a directory that exists.
func Invited(dir, name string) (i Invitation, found bool, err error) {
	if !Listed(dir) || !Listed(credentialsPath(dir, name)) {
		return i, false, nil
	}
	i, err = readInvitation(dir, name)
	if absent(err) {
		return i, false, nil // removed meanwhile
	}
	return i, err == nil, err
}

// reachTimeout is how long an address of an invitation may take to answer.
const reachTimeout = 3 * time.Second

// Reach returns the first of the addresses at which the endpoint answers this machine:
// it has the certificate of the job's credentials in dir.
func (i Invitation) Reach(ctx context.Context, dir string) (address string, err error) {
	c, err := readCredentials(dir, i.Job)
	if err != nil {
		return "", fmt.Errorf("reach the agent on %s: %w", i.Host, err)
	}
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	errs := make([]chan error, len(i.Addresses))
	for k, a := range i.Addresses {
		errs[k] = make(chan error, 1)
		go func() {
			pinned := connect(nil, c.Certificate, reachTimeout)
			defer pinned.close()
			_, _, err := call[jobInfo](ctx, pinned, credential{}, http.MethodGet, "https://"+a+"/v1/job?nonce=reach", nil, smallBody)
			errs[k] <- err
		}()
	}
	var failed []error
	for k, a := range i.Addresses {
		if err := <-errs[k]; err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", a, err))
			continue
		}
		return a, nil
	}
	return "", problem.Errorf(problem.Unavailable, "reach the agent on %s: %w", i.Host, errors.Join(failed...))
}

// Addresses returns the addresses of this machine that other machines may reach, the
// likeliest first: that of a route to master, the host that the launcher of a job names,
// then all others. Loopback addresses are last, and only there if master is one.
func Addresses(ctx context.Context, master string) []string {
	var first, rest []netip.Addr
	route, err := (&net.Dialer{}).DialContext(ctx, "udp", net.JoinHostPort(master, strconv.Itoa(discardPort)))
	if err == nil && master != "" {
		if udp, ok := route.LocalAddr().(*net.UDPAddr); ok {
			first = append(first, udp.AddrPort().Addr().Unmap())
		}
	}
	if err == nil {
		_ = route.Close() // nothing was sent
	}
	local, _ := thisMachine.local() // without them, there is the route
	for _, a := range local {
		if !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			rest = append(rest, a)
		}
	}
	all := append(first, rest...)
	if len(first) > 0 && first[0].IsLoopback() {
		all = append(rest, first[0])
	}
	var texts []string
	for _, a := range all {
		if text := a.String(); !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return texts
}

// discardPort is that of the discard protocol: connecting a UDP socket sends nothing.
const discardPort = 9

// Host returns the host of the endpoint's address, as this node reaches it.
func (l *Link) Host() string {
	host, _, err := net.SplitHostPort(l.c.Address)
	if err != nil {
		return l.c.Address
	}
	return host
}

// probe asks the coordinator to look for a file that a node has made.
type probe struct {
	Name string `json:"name"`
	Text string `json:"text"`
	Host string `json:"host"`
}

// Limits of a probe: how long a file of another node may take to appear, and the size of
// the request in bytes.
const (
	probeTimeout = time.Minute
	maxProbe     = 4 << 10
)

const probePath = "/v1/probe"

// ServeProbes answers [Link.ProveShared] of other nodes, for a directory as this node sees
// it.
func (e *Endpoint) ServeProbes(dir string, log *slog.Logger) {
	e.Handle("POST "+probePath, httpkit.Handle(maxProbe, func(ctx context.Context, p probe) (claim.Sharing, error) {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		found, err := claim.Look(ctx, dir, p.Name, p.Text)
		if err != nil {
			here, _ := os.Hostname()
			return found, problem.Errorf(problem.Invalid, "store of node %s, as node %s sees it: %w: mount one directory on both under the same path", p.Host, here, err)
		}
		if !found.Locks {
			log.Warn("locks on the store's filesystem hold for one machine only; the owner claims the store by a file instead", "dir", dir, "node", p.Host)
		}
		return found, nil
	}))
}

// ProveShared proves that the coordinator sees what this node writes in a directory. The
// other way is proved by joining. A request without an answer is repeated: the coordinator
// may be paused. If the link ends meanwhile, its error is returned.
func (l *Link) ProveShared(ctx context.Context, dir string) (err error) {
	trace, err := claim.Leave(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, trace.Remove()) }()
	for {
		var found claim.Sharing
		err := l.Request(ctx, probePath, probe{trace.Name, trace.Text, l.Self().Host}, &found)
		switch {
		case err == nil:
			return nil
		case l.final(err), l.ctx.Err() != nil:
			return cmp.Or(l.Err(), err)
		case problem.Given(err):
			return err
		}
		if pauseFor(ctx, l.interval()) != nil {
			return err
		}
	}
}
