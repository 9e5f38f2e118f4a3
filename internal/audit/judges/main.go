// Judges has programs of other projects judge the evidence of a log: Tessera's fsck and
// the verifier of torchwood. It imports nothing of ckptstore, and reads what an auditor
// has: the address of a log, a policy, a proof.
//
//	judges fsck  --policy POLICY URL             every tile and bundle against the head
//	judges proof --policy POLICY [--log URL] F   the proof of one event
//	judges agent SOCKET                          an SSH agent with a new key, for litewitness
//
// With --flip, fsck and proof also judge copies with one changed bit, and fail if a copy
// passes. litewitness.mod pins torchwood's witness. It is a file of its own because
// `go mod tidy` also wants the modules of that program's tests:
//
//	go build -modfile=litewitness.mod -o litewitness filippo.io/torchwood/cmd/litewitness
package main

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
	"golang.org/x/mod/sumdb/note"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "judges:", err)
		os.Exit(1)
	}
}

const usage = "want `fsck --policy POLICY URL`, `proof --policy POLICY FILE` or `agent SOCKET`"

// options are the flags of fsck and of proof.
type options struct {
	policy string
	log    string
	flip   bool
	within time.Duration
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	var o options
	f := flag.NewFlagSet(args[0], flag.ContinueOnError)
	f.StringVar(&o.policy, "policy", "", "file in the form of C2SP tlog-policy")
	f.StringVar(&o.log, "log", "", "of proof: read the entry from the log at this URL")
	f.BoolVar(&o.flip, "flip", false, "also judge copies with one changed bit, which must be refused")
	f.DurationVar(&o.within, "within", time.Minute, "limit of one judgement")
	if err := f.Parse(args[1:]); err != nil {
		return err
	}
	if f.NArg() != 1 {
		return errors.New(usage)
	}
	switch args[0] {
	case "fsck":
		return fsckLog(ctx, o, f.Arg(0), out)
	case "proof":
		return judgeProof(ctx, o, f.Arg(0), out)
	case "agent":
		return serveAgent(ctx, f.Arg(0), out)
	}
	return errors.New(usage)
}

// logKey returns the verifier of the first log of a policy. Tessera takes a key, not a
// policy.
func logKey(policy string) (note.Verifier, error) {
	text, err := os.ReadFile(policy)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "log" {
			return note.NewVerifier(fields[1])
		}
	}
	return nil, fmt.Errorf("%s has no line `log KEY`", policy)
}

// serveAgent serves the protocol of ssh-agent on a socket until ctx ends, with a new
// Ed25519 key whose fingerprint it prints. litewitness signs by such an agent only.
func serveAgent(ctx context.Context, socket string, out io.Writer) error {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	ring := agent.NewKeyring()
	if err := ring.Add(agent.AddedKey{PrivateKey: key}); err != nil {
		return err
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		return err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", socket)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	if _, err := fmt.Fprintln(out, ssh.FingerprintSHA256(signer.PublicKey())); err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		go func() {
			_ = agent.ServeAgent(ring, conn) // it ends with the connection
			_ = conn.Close()
		}()
	}
}
