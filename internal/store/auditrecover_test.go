package store

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
)

// TestAuditRecover recovers a store with tamper evidence: the report has where that is now,
// and the new log begins without and takes a new key. So does one whose configuration of
// the evidence is lost with the log. The new evidence quotes the newest note of the old, if
// that is there.
func TestAuditRecover(t *testing.T) {
	for what, lose := range map[string]func(dir string) error{
		"the log":                 func(string) error { return nil },
		"the log and config.json": func(dir string) error { return os.Remove(filepath.Join(dir, "audit", "config.json")) },
	} {
		t.Run(what, func(t *testing.T) {
			dir, _ := audited(t, "")
			s := open(t, dir)
			must(t, s, "a", events.TrialCreated{}, events.GroupStarted{Attempt: 1, Job: "j", WorldSize: 1})
			committed(t, s, "a", 1)
			iterations(t, s, "a", 1, 300) // a full tile, which the new log must not meet
			note, old := want(t, s)
			id := s.ID
			shut(t, s)
			if err := os.RemoveAll(filepath.Join(dir, "log")); err != nil {
				t.Fatal(err)
			}
			if err := lose(dir); err != nil {
				t.Fatal(err)
			}
			r, err := Recover(t.Context(), RecoverOptions{Location: dir})
			if err != nil {
				t.Fatal(err)
			}
			if aside := filepath.Join(dir, "audit."+id); r.Evidence != aside || !exists(filepath.Join(aside, "checkpoint")) || ledger.On(dir) {
				t.Errorf("the evidence of the old log is in %q, want %s; on: %v", r.Evidence, aside, ledger.On(dir))
			}
			if _, err := ledger.Keygen(ledger.KeygenOptions{Store: dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/" + r.Store, Formerly: r.Formerly}); err != nil {
				t.Fatal(err)
			}
			s = open(t, dir)
			quoted := ""
			for e, err := range s.Log.Read(t.Context(), 1, last(t, s)) {
				if err != nil {
					t.Fatal(err)
				}
				if body, err := e.Body(); err == nil {
					if sealed, ok := body.(*events.AuditSealed); ok {
						quoted += sealed.Previous
					}
				}
			}
			iterations(t, s, "a", 301, 600)
			if _, h := want(t, s); h.Size < 256 || h.Origin != "example.org/"+r.Store {
				t.Errorf("new head %+v", h)
			}
			b, err := s.Ledger()
			if err != nil {
				t.Fatal(err)
			}
			v, err := b.Verify(t.Context(), &old)
			if err != nil || len(v.Findings) != 1 {
				t.Errorf("since a head of the lost log: %+v, %v", v, err)
			}
			if found := fmt.Sprint(v.Findings); what == "the log" && (quoted != string(note) || !strings.Contains(found, "log replaced")) || what != "the log" && (quoted != "" || !strings.Contains(found, "no decision of this log")) {
				t.Errorf("quoted %q, found %s", quoted, found)
			}
			shut(t, s)
		})
	}
}

// TestAuditRecoverFrom recovers a store with tamper evidence into another directory: the evidence
// stays where it is, and the new log quotes its newest note.
func TestAuditRecoverFrom(t *testing.T) {
	dir, _ := audited(t, "")
	s := open(t, dir)
	must(t, s, "a", events.TrialCreated{}, events.GroupStarted{Attempt: 1, Job: "j", WorldSize: 1})
	committed(t, s, "a", 1)
	note, _ := want(t, s)
	shut(t, s)
	if err := os.RemoveAll(filepath.Join(dir, "log")); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "new")
	r, err := Recover(t.Context(), RecoverOptions{Location: to, From: dir})
	if err != nil {
		t.Fatal(err)
	}
	if old := filepath.Join(dir, "audit"); r.Evidence != old || !exists(filepath.Join(old, "checkpoint")) || ledger.On(to) {
		t.Errorf("the evidence of the old log is in %q, want %s; on: %v", r.Evidence, old, ledger.On(to))
	}
	if _, err := ledger.Keygen(ledger.KeygenOptions{Store: to, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/" + r.Store, Formerly: r.Formerly}); err != nil {
		t.Fatal(err)
	}
	s = open(t, to)
	want(t, s)
	quoted := ""
	for e, err := range s.Log.Read(t.Context(), 1, last(t, s)) {
		if err != nil {
			t.Fatal(err)
		}
		if body, err := e.Body(); err == nil {
			if sealed, ok := body.(*events.AuditSealed); ok {
				quoted += sealed.Previous
			}
		}
	}
	if quoted != string(note) {
		t.Errorf("quoted %q, want %q", quoted, note)
	}
	shut(t, s)
}
