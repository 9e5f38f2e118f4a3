//go:build testbed || outlive

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// A coordinator is stopped when it has only the commit of a save left to do. Its guard kills
// its ranks. The job is started again on other nodes, whose coordinator takes the run when
// the lease has expired, and commits the save. When the first coordinator continues, the log
// refuses all that it decides, and it ends with 5. The log is served from another node,
// because a coordinator that owns the log cannot be replaced while it lives.
func TestReplacedCoordinator(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c", "d"}, disk: netfs.NFS()})
	// Once a is stopped, b writes its files before it hears nothing for half of the timeout.
	s := &scene{t: t, ctx: ctx, cluster: c, job: steady(twoNodes())}
	owner := s.serveTLS("d", &s.job)
	s.a, s.b = s.launch("a"), s.launch("b")
	s.group(0, 12)

	// The last files of the next save are those of b.
	disk := s.node("b").Disk(sharedAt)
	disk.Break(netfs.Fault{Ops: []netfs.Op{netfs.OpWrite}, Hang: true})
	check(t, await(ctx, "a write that hangs", func() (bool, error) { return disk.Counters().Hanging > 0, nil }))
	var open string // the save
	check(t, await(ctx, "the writes of a in the log", func() (bool, error) {
		all, err := s.eventsFrom("d")
		open = openSave(all)
		return open != "" && wrote(all, open, "n0"), err
	}))
	check(t, s.a.pause())
	disk.Heal()
	check(t, await(ctx, "the writes of b in the log", func() (bool, error) {
		all, err := s.eventsFrom("d")
		return wrote(all, open, "n1"), err
	}))
	check(t, s.b.kill())
	must[int](t)(s.b.code(ctx))

	s.job.meet = "b"
	s.job.more = []string{"--node-rank", "1"} // as before
	s.b = s.launch("b")
	s.job.more = []string{"--node-rank", "0"} // in place of a
	s.c = s.launch("c")
	s.on(s.group(1, 12), "c", "b")
	check(t, s.a.resume())
	code := must[int](t)(s.a.code(ctx))
	if code != 5 {
		t.Errorf("the trainer on a exits with %d, want 5", code)
	}
	if n := s.workers("a"); n > 0 {
		t.Errorf("%d workers are left on a", n)
	}
	s.group(1, 60)
	check(t, s.finish())
	s.ended(s.b, s.c)
	check(t, unix.Kill(owner.Process.Pid, unix.SIGTERM))
	s.ended(owner)
	s.over(ctx, t)

	all := s.events()
	groups := of(all, "group.started")
	if len(groups) != 2 {
		t.Fatalf("groups %+v", groups)
	}
	first, second := groups[0].Data.Job, groups[1]
	for _, e := range all {
		decision := strings.Contains(e.Subject, ".s.") && e.Source == "trainer/"+first
		if decision && e.Sequence > second.Sequence {
			t.Errorf("the first coordinator has decided after the second: %+v", e)
		}
	}
	commits := 0
	for _, e := range of(all, "checkpoint.committed") {
		if e.Data.Checkpoint == open {
			commits++
			t.Logf("%s was committed by %s, the jobs are %s and %s", open, e.Source, first, second.Data.Job)
			if e.Source == "trainer/"+first {
				t.Errorf("%s was committed by the first coordinator", open)
			}
		}
	}
	if commits != 1 || second.Data.Resume != open {
		t.Errorf("%s was committed %d times; the second group resumes %s", open, commits, second.Data.Resume)
	}
}

// openSave returns the save that is begun and neither committed nor aborted.
func openSave(all []event) (checkpoint string) {
	for _, e := range all {
		switch e.Type {
		case "ckpt.checkpoint.begun.v1":
			checkpoint = e.Data.Checkpoint
		case "ckpt.checkpoint.committed.v1", "ckpt.checkpoint.aborted.v1":
			checkpoint = ""
		}
	}
	return checkpoint
}

// wrote reports whether a node has written its files of a save.
func wrote(all []event, checkpoint, node string) bool {
	for _, kind := range []string{"write.node", "write.completed"} {
		for _, e := range of(all, kind) {
			if e.Data.Checkpoint == checkpoint && strings.Contains(e.Subject, "."+node+".") {
				return true
			}
		}
	}
	return false
}

// serveTLS starts an owner of the store on a node, which serves all nodes, and has the job
// use it.
func (s *scene) serveTLS(name string, j *job) *trainer {
	s.t.Helper()
	m := s.node(name)
	cert, key := certificate(s.t, m.Addr().AsSlice())
	check(s.t, os.WriteFile(s.shared("cert.pem"), cert, 0o600))
	check(s.t, os.WriteFile(s.shared("key.pem"), key, 0o600))
	const port = 4222
	token := "CKPTSTORE_STORE_TOKEN=" + rand.Text() + rand.Text()
	program := filepath.Join(s.bin, "ckptstore")
	check(s.t, m.Command(s.ctx, program, "init", "--store", storeAt).Run())
	owner := must[*trainer](s.t)(s.execute(s.ctx, m, program, []string{
		"serve", "--store", storeAt, "--listen", fmt.Sprintf("%v:%d", m.Addr(), port),
		"--tls-cert", sharedAt + "/cert.pem", "--tls-key", sharedAt + "/key.pem",
	}, []string{token}))
	check(s.t, owner.prints(s.ctx, "serving store"))
	j.store = fmt.Sprintf("tls://%v:%d", m.Addr(), port)
	j.env = []string{token, "CKPTSTORE_TLS_CA=" + sharedAt + "/cert.pem"}
	return owner
}

// certificate returns a certificate for an address and its key.
func certificate(t *testing.T, address net.IP) (cert, key []byte) {
	t.Helper()
	pair := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().AddDate(-1, 0, 0), NotAfter: time.Now().AddDate(1, 0, 0),
		IPAddresses: []net.IP{address}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, template, template, pair.Public(), pair))
	text := must[[]byte](t)(x509.MarshalPKCS8PrivateKey(pair))
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: text})
}
