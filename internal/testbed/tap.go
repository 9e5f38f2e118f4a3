package testbed

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// nic is the name of a node's network interface.
const nic = "eth0"

// openTAP creates the interface [nic] in the network namespace of the calling thread,
// gives it its addresses and takes it up, also the loopback interface. Each Read of the
// returned device is a frame from the node, each Write a frame to it. The
// interface is removed when the device is closed.
func openTAP(at netip.Prefix, mtu int, offload bool) (io.ReadWriteCloser, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w; a node needs TAP devices", err)
	}
	req, err := unix.NewIfreq(nic)
	if err == nil {
		flags := uint16(unix.IFF_TAP | unix.IFF_NO_PI)
		if offload {
			flags |= unix.IFF_VNET_HDR
		}
		req.SetUint16(flags)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err == nil && offload {
		err = unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4)
	}
	if err == nil {
		err = configure(at, mtu)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("create the interface %s: %w", nic, err)
	}
	// From here the runtime polls the file, so a Close ends a Read.
	tap := os.NewFile(uintptr(fd), "tap")
	if !offload {
		return tap, nil
	}
	raw, err := tap.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, tap.Close())
	}
	return &offloaded{tap, raw}, nil
}

// offloads is the length of the kernel's description of a frame of an adapter that segments: struct
// virtio_net_hdr.
const offloads = 10

// offloaded is a TAP device that segments and computes checksums. A frame may be longer than the MTU,
// and its last bytes are the kernel's description of it: so a switch finds the addresses where they are in
// other frames.
type offloaded struct {
	file *os.File
	raw  syscall.RawConn
}

var _ io.ReadWriteCloser = (*offloaded)(nil)

// Close implements [io.Closer]. It ends a Read.
func (o *offloaded) Close() error { return o.file.Close() }

// Read implements [io.Reader].
func (o *offloaded) Read(frame []byte) (n int, err error) {
	if len(frame) < offloads {
		return 0, io.ErrShortBuffer
	}
	var of [offloads]byte
	into := [][]byte{of[:], frame[:len(frame)-offloads]}
	rerr := o.raw.Read(func(fd uintptr) bool {
		n, err = unix.Readv(int(fd), into)
		return !errors.Is(err, unix.EAGAIN)
	})
	if err = errors.Join(err, rerr); err != nil {
		return 0, err
	}
	if n < offloads {
		return 0, io.ErrUnexpectedEOF
	}
	return copy(frame[n-offloads:], of[:]) + n - offloads, nil
}

// Write implements [io.Writer].
func (o *offloaded) Write(frame []byte) (n int, err error) {
	end := len(frame) - offloads
	if end < 0 {
		return 0, io.ErrShortWrite
	}
	werr := o.raw.Write(func(fd uintptr) bool {
		n, err = unix.Writev(int(fd), [][]byte{frame[end:], frame[:end]})
		return !errors.Is(err, unix.EAGAIN)
	})
	return n, errors.Join(err, werr)
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
