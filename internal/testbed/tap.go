package testbed

import (
	"fmt"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// nic is the name of a node's network interface.
const nic = "eth0"

// openTAP creates the interface [nic] in the network namespace of the calling thread,
// gives it its addresses and takes it up, also the loopback interface. Each Read of the
// returned file is a frame from the node, each Write a frame to it. The
// interface is removed when the file is closed.
func openTAP(at netip.Prefix, mtu int) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w; a node needs TAP devices", err)
	}
	req, err := unix.NewIfreq(nic)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err == nil {
		err = configure(at, mtu)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("create the interface %s: %w", nic, err)
	}
	// From here the runtime polls the file, so a Close ends a Read.
	return os.NewFile(uintptr(fd), "tap"), nil
}

// configure sets up the interfaces of the calling thread's network namespace.
func configure(at netip.Prefix, mtu int) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	// Without IPv6 a silent node sends no frame, so counters show only what tests cause.
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+nic+"/disable_ipv6", []byte("1"), 0); err != nil && !os.IsNotExist(err) {
		return err
	}
	if err := setHardwareAddress(fd, at.Addr()); err != nil {
		return err
	}
	mask := ^uint32(0) << (32 - at.Bits())
	steps := []struct {
		what string
		name string
		call uint
		set  func(*unix.Ifreq) error
	}{
		{"take up lo", "lo", unix.SIOCSIFFLAGS, flagsUp},
		{"set the MTU", nic, unix.SIOCSIFMTU, func(r *unix.Ifreq) error { r.SetUint32(uint32(mtu)); return nil }},
		{"set the address", nic, unix.SIOCSIFADDR, func(r *unix.Ifreq) error { return r.SetInet4Addr(at.Addr().AsSlice()) }},
		{"set the netmask", nic, unix.SIOCSIFNETMASK, func(r *unix.Ifreq) error {
			return r.SetInet4Addr([]byte{byte(mask >> 24), byte(mask >> 16), byte(mask >> 8), byte(mask)})
		}},
		{"take it up", nic, unix.SIOCSIFFLAGS, flagsUp},
	}
	for _, step := range steps {
		req, err := unix.NewIfreq(step.name)
		if err == nil {
			err = step.set(req)
		}
		if err == nil {
			err = unix.IoctlIfreq(fd, step.call, req)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

func flagsUp(r *unix.Ifreq) error {
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return nil
}

// setHardwareAddress derives the interface's address from its IP address: a node that
// is powered on again keeps it, as a machine does.
func setHardwareAddress(fd int, ip netip.Addr) error {
	var req struct {
		name   [unix.IFNAMSIZ]byte
		family uint16
		data   [14]byte
		_      [8]byte
	}
	copy(req.name[:], nic)
	req.family = unix.ARPHRD_ETHER
	req.data[0] = 0x02 // locally administered
	copy(req.data[2:6], ip.AsSlice())
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFHWADDR, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return fmt.Errorf("set the hardware address: %w", errno)
	}
	return nil
}
