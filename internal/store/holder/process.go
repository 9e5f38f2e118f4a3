// Package holder tells whether the process that holds a lease has ended.
//
// The log has no other way to know it: a lease of a process on another machine is waited for
// until it expires, which takes seconds. Two proofs are faster, and each is certain:
//
//	process.go  the process would be visible here, and does not exist
//	witness.go  nothing locks the file that the process keeps locked: for a process of an
//	            earlier container, whose number means nothing here
package holder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// Process identifies the process that holds a lease, and is kept in the lease as JSON. Boot and
// Start distinguish a process from a later one with the same number, Space from one in another
// container. Witness shows a later container of the same pod whether the process lives.
type Process struct {
	Job   string `json:"job"` // or another part of the process with an identity of its own
	Host  string `json:"host"`
	PID   int    `json:"pid"`
	Boot  string `json:"boot"`  // of the machine
	Space string `json:"space"` // of process numbers
	Start string `json:"start"` // of the process, in the kernel's ticks

	Witness string `json:"witness,omitempty"` // see [Witness.Name]
}

// This returns this process as the holder of a lease for a job, without a witness.
func This(job string) (Process, error) {
	host, err := os.Hostname()
	if err != nil {
		return Process{}, fmt.Errorf("hostname: %w", err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return Process{}, fmt.Errorf("identity of this boot: %w", err)
	}
	space, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return Process{}, fmt.Errorf("identity of this process: %w", err)
	}
	start, _, err := startTime(os.Getpid())
	return Process{Job: job, Host: host, PID: os.Getpid(), Boot: string(bytes.TrimSpace(boot)), Space: space, Start: start}, err
}

// Same reports whether p is the holder me. A store that is opened again has another witness.
func (p Process) Same(me Process) bool {
	p.Witness = me.Witness
	return p == me
}

// Near reports whether the process me could see p: p runs on this machine, in this boot, in
// the same process number space.
func (p Process) Near(me Process) bool {
	return p.Host == me.Host && p.Boot == me.Boot && p.Space == me.Space
}

// Dead reports whether p has certainly ended: it would be near, and does not exist.
func (p Process) Dead(me Process) bool {
	if !p.Near(me) {
		return false
	}
	start, zombie, err := startTime(p.PID)
	// Another user's process may be hidden in /proc, but exists.
	return (errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH)) && errors.Is(syscall.Kill(p.PID, 0), syscall.ESRCH) || err == nil && (zombie || start != p.Start)
}

// DeadSoon is [Process.Dead], but waits half a second for the kernel to end a process that was
// just killed: users restart a trainer right after a kill.
func (p Process) DeadSoon(ctx context.Context, me Process) bool {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	for !p.Dead(me) {
		if p.Host != me.Host {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(10 * time.Millisecond):
		}
	}
	return true
}

// startTime returns field 22 of /proc/PID/stat, and whether the process is a zombie.
func startTime(pid int) (start string, zombie bool, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", false, err
	}
	// The name in parentheses may hold anything; field 3 follows it.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return "", false, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	return string(fields[19]), fields[0][0] == 'Z', nil
}
