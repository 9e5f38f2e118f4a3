package nodes

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// machine answers questions about the names and addresses of this machine. Tests replace
// it.
type machine struct {
	lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	local  func() ([]netip.Addr, error)
	name   func() string // host name; "" if unknown
	pod    bool          // it is a pod of Kubernetes
}

// thisMachine is the machine of this process.
var thisMachine = machine{
	lookup: func(ctx context.Context, host string) ([]netip.Addr, error) {
		return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	},
	local: func() (list []netip.Addr, err error) {
		addrs, err := net.InterfaceAddrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				list = append(list, p.Addr().Unmap())
			}
		}
		return list, err
	},
	name: func() string {
		name, _ := os.Hostname()
		return name
	},
	pod: os.Getenv("KUBERNETES_SERVICE_HOST") != "",
}

// IsHere reports whether the host of an endpoint, HOST:PORT, is this machine.
//
// The answer may be wrong for a while after a machine was started: its name may be
// unknown then, or lead to the machine that had the name before. A caller that waits for
// the endpoint asks again.
func IsHere(ctx context.Context, endpoint string) bool {
	host, _, err := net.SplitHostPort(endpoint)
	return err == nil && thisMachine.is(ctx, host)
}

// is reports whether host is a name or an address of this machine.
func (m machine) is(ctx context.Context, host string) bool {
	if host == "localhost" || host == m.name() || m.isPod(host) {
		return true
	}
	if m.isOtherPod(host) {
		return false
	}
	addrs, err := m.lookup(ctx, host)
	if err != nil {
		return false
	}
	local, err := m.local()
	return err == nil && slices.ContainsFunc(addrs, func(a netip.Addr) bool { return slices.Contains(local, a.Unmap()) })
}

// isPod reports whether host is the name of this pod, such as bert-0.bert. Kubernetes
// takes the first part of it from the pod's host name. It publishes the name after the
// pod has started, and that of a pod which replaces another leads to the other's address
// for as long as name servers keep it. So the name decides, and no name server.
func (m machine) isPod(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil || !m.pod {
		return false
	}
	first, _, _ := strings.Cut(host, ".")
	mine, _, _ := strings.Cut(m.name(), ".")
	return first != "" && strings.EqualFold(first, mine)
}

// isOtherPod reports whether host is the name of another pod of the same indexed job: bert-0 for
// bert-1. Its address may be this pod's, if a name server keeps that of the pod before it.
func (m machine) isOtherPod(host string) bool {
	set := func(name string) (string, bool) {
		name, _, _ = strings.Cut(name, ".")
		at := strings.LastIndexByte(name, '-')
		_, err := strconv.ParseUint(name[at+1:], 10, 31)
		return name[:max(at, 0)], at > 0 && err == nil
	}
	mine, ranked := set(m.name())
	other, also := set(host)
	return m.pod && ranked && also && strings.EqualFold(mine, other) && !m.isPod(host)
}

// listenAt returns the address to listen at for an endpoint HOST:PORT, and a warning.
//
// A numeric address and localhost are taken literally. A name is not: many machines
// resolve their own name to 127.0.1.1, where no other node can connect. So for a name the
// endpoint listens on all addresses.
func (m machine) listenAt(ctx context.Context, address string) (listen, warning string, err error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil || port == "" {
		return "", "", problem.Errorf(problem.Invalid, "listen at endpoint %q: it is not HOST:PORT; give the name or address of this node and a free port", address)
	}
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" || host == "" {
		return address, "", nil
	}
	all := net.JoinHostPort("", port)
	if m.isPod(host) {
		return all, "", nil
	}
	addrs, err := m.lookup(ctx, host)
	if err != nil {
		return all, fmt.Sprintf("endpoint host %s is unknown here: %v; if the other nodes do not know it either, give a numeric address", host, err), nil
	}
	local, err := m.local()
	if err != nil {
		return "", "", fmt.Errorf("list the addresses of this machine: %w", err)
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	switch {
	case !slices.ContainsFunc(addrs, func(a netip.Addr) bool { return !a.IsLoopback() }):
		warning = fmt.Sprintf("endpoint host %s is %s on this node, where no other node can connect; listening on all addresses", host, join(addrs))
	case !slices.ContainsFunc(addrs, func(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(local, a) }):
		warning = fmt.Sprintf("endpoint host %s is %s, but this node has %s; listening on all addresses: if no node can join, name this node as the endpoint", host, join(addrs), join(local))
	}
	return all, warning, nil
}

func join(addrs []netip.Addr) string {
	texts := make([]string, len(addrs))
	for i, a := range addrs {
		texts[i] = a.String()
	}
	return strings.Join(texts, ", ")
}

// numeric returns the address of a connection's end without its port, and whether it is
// an address that other machines can use.
func numeric(a net.Addr) (string, bool) {
	tcp, ok := a.(*net.TCPAddr)
	if !ok || tcp.IP.IsUnspecified() {
		return "", false
	}
	return tcp.IP.String(), !tcp.IP.IsLoopback()
}

// here fills in what a node does not declare about itself.
func (n Node) here(newKey func() string) Node {
	if n.Host == "" {
		n.Host, _ = os.Hostname()
	}
	if n.Boot == "" {
		boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
		n.Boot = strings.TrimSpace(string(boot))
	}
	if n.Net == "" {
		n.Net, _ = os.Readlink("/proc/self/ns/net")
	}
	if n.PID == 0 {
		n.PID = os.Getpid()
	}
	if n.Key == "" {
		n.Key = newKey()
	}
	return n
}
