package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/internal/testbed/ethernet"
)

// Options configure a [Testbed]. The zero value is valid.
type Options struct {
	// Seed determines which frames lossy cables lose.
	Seed uint64
	// Network is the subnet of the nodes; the first one gets its first address. The zero
	// value is 10.77.0.0/24.
	Network netip.Prefix
	// MTU is that of all interfaces. 0 is 9000, as in most training clusters.
	MTU int
	// Offload has the interfaces segment and compute checksums, as the adapters of clusters do: one frame
	// of up to 64 KiB passes the switch in place of its segments, and costs the nodes' CPUs less. A
	// cable then loses and delays such frames as one.
	Offload bool
	// Signals freezes nodes by SIGSTOP even where cgroups could.
	Signals bool
}

// Testbed is a set of nodes on one switch.
type Testbed struct {
	options Options
	fabric  *ethernet.Switch
	dir     string // on the host

	mu    sync.Mutex
	nodes []*Node
}

// New returns a testbed without nodes. It returns the reason if this machine cannot
// have one.
func New(o Options) (*Testbed, error) {
	if err := Supported(); err != nil {
		return nil, err
	}
	if !mainCalled {
		return nil, errors.New("make a testbed: call testbed.Main first in TestMain or main")
	}
	if o.Network == (netip.Prefix{}) {
		o.Network = netip.MustParsePrefix("10.77.0.0/24")
	}
	if !o.Network.Addr().Is4() {
		return nil, fmt.Errorf("make a testbed: network %v: only IPv4 is supported", o.Network)
	}
	if o.MTU == 0 {
		o.MTU = 9000
	}
	dir, err := os.MkdirTemp("", "testbed-")
	if err != nil {
		return nil, fmt.Errorf("make a testbed: %w", err)
	}
	return &Testbed{options: o, fabric: ethernet.New(o.Seed), dir: dir}, nil
}

// Supported returns nil if this machine can have nodes, and otherwise what is missing.
func Supported() error {
	if os.Geteuid() != 0 {
		return errors.New("a testbed needs root: namespaces, TAP devices and mounts; run as root")
	}
	for _, device := range []string{"/dev/net/tun", "/dev/fuse"} {
		f, err := os.OpenFile(device, os.O_RDWR, 0)
		if err != nil {
			return fmt.Errorf("a testbed needs %s: %w; load its module, or pass the device to the container", device, err)
		}
		f.Close()
	}
	return nil
}

// Switch returns the switch that all nodes are attached to, by their names.
func (t *Testbed) Switch() *ethernet.Switch { return t.fabric }

// Nodes returns the nodes in the order in which they were started.
func (t *Testbed) Nodes() []*Node {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.nodes)
}

// Start adds a node and powers it on. It returns when the node can execute commands.
func (t *Testbed) Start(ctx context.Context, c Config) (*Node, error) {
	n, err := t.add(c)
	if err != nil {
		return nil, fmt.Errorf("start node %s: %w", c.Name, err)
	}
	return n, n.PowerOn(ctx)
}

// add gives a new node its address and makes it known to all.
func (t *Testbed) add(c Config) (*Node, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.Name == "" || strings.ContainsAny(c.Name, "/ \t\n") {
		return nil, errors.New("its name must be a host name")
	}
	addr := t.options.Network.Masked().Addr().Next()
	for _, n := range t.nodes {
		if n.Name() == c.Name {
			return nil, errors.New("the testbed has a node of this name")
		}
		addr = n.Addr().Next()
	}
	if !t.options.Network.Contains(addr.Next()) {
		return nil, fmt.Errorf("network %v has no address left", t.options.Network)
	}
	n := &Node{bed: t, config: c, address: netip.PrefixFrom(addr, t.options.Network.Bits())}
	t.nodes = append(t.nodes, n)
	return n, t.writeHosts()
}

// writeHosts writes the /etc/hosts of all nodes. The file is written in place, because
// nodes have it mounted.
func (t *Testbed) writeHosts() error {
	text := "127.0.0.1 localhost\n"
	for _, n := range t.nodes {
		text += fmt.Sprintf("%v %s\n", n.Addr(), n.Name())
	}
	return os.WriteFile(t.hosts(), []byte(text), 0o644)
}

func (t *Testbed) hosts() string { return filepath.Join(t.dir, "hosts") }

// Close powers all nodes off and frees everything.
func (t *Testbed) Close() error {
	var errs []error
	for _, n := range t.Nodes() {
		errs = append(errs, n.PowerOff())
	}
	return errors.Join(append(errs, os.RemoveAll(t.dir))...)
}
