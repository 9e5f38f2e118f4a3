// Package attest states, in the formats of other verifiers, which files an exported
// checkpoint consists of and where it comes from, and signs such statements.
//
//	statement   in-toto Statement v1 in JSON: a subject and a predicate
//	subject     the exported directory: SHA-256 over the SHA-256 of its files, by name
//	model       predicate of OpenSSF Model Signing v1.0: every file with its SHA-256
//	provenance  predicate SLSA provenance v1: the job, its configuration, the parents
//	bundle      Sigstore bundle v0.3 with the statement in a DSSE envelope
//
// A signature is deterministic (RFC 6979): the same statement and key give the same bundle.
// Only the standard library signs.
package attest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Types of statements and predicates.
const (
	statementType  = "https://in-toto.io/Statement/v1"
	modelType      = "https://model_signing/signature/v1.0"
	provenanceType = "https://slsa.dev/provenance/v1"
	buildType      = "https://github.com/ckptstore/ckptstore/training/v1"
)

// File is a file of an exported checkpoint.
type File struct {
	Name   string // within the directory
	SHA256 [sha256.Size]byte
	Also   bool // not of the checkpoint: signed because the signer asked for it
}

// Subject is an exported directory.
type Subject struct {
	Name  string
	Files []File
}

// Checkpoint names a committed checkpoint of a store.
type Checkpoint struct {
	Store      string // identity, a UUID
	Run        string
	Trial      string
	ID         string
	Step       int64
	Sequence   uint64 // of checkpoint.committed
	Manifest   string // BLAKE3-256 in hexadecimal; empty: unknown
	Committed  time.Time
	Unresolved string // why sequence and manifest are unknown; empty if they are known
}

// Ref returns the reference as users write it. Of an unresolved checkpoint, the ID is all
// that is known.
func (c Checkpoint) Ref() string {
	if c.Run == "" {
		return c.ID
	}
	return c.Run + "/" + c.Trial + "@" + c.ID
}

// uri returns the place of the checkpoint in its store.
func (c Checkpoint) uri() string {
	if c.Run == "" {
		return "ckptstore:" + c.Store + "/" + url.PathEscape(c.ID)
	}
	return "ckptstore:" + strings.Join([]string{c.Store, url.PathEscape(c.Run), url.PathEscape(c.Trial), url.PathEscape(c.ID)}, "/")
}

func (c Checkpoint) digest() map[string]string {
	if c.Manifest == "" {
		return nil
	}
	return map[string]string{"blake3": c.Manifest}
}

// Training is the job that made a checkpoint, as the log has it: its command line and
// configuration have lost their secrets.
type Training struct {
	Checkpoint Checkpoint
	Parents    []Checkpoint // that it continues from
	Job        string       // a UUID
	Host       string
	Command    []string
	Flags      []string // of the trainer
	Resume     string   // as requested
	Config     map[string]any
	Attempt    int
	WorldSize  int
	NProc      int
	NNodes     int
	Started    time.Time // of the job
}

// descriptor is a ResourceDescriptor of in-toto.
type descriptor struct {
	Name        string            `json:"name,omitempty"`
	URI         string            `json:"uri,omitempty"`
	Digest      map[string]string `json:"digest,omitempty"`
	Annotations map[string]any    `json:"annotations,omitempty"`
}

// statement is an in-toto Statement v1.
type statement struct {
	Type          string       `json:"_type"`
	Subject       []descriptor `json:"subject"`
	PredicateType string       `json:"predicateType"`
	Predicate     any          `json:"predicate"`
}

// sorted returns the files by name.
func (s Subject) sorted() []File {
	files := slices.Clone(s.Files)
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return files
}

// Root returns the SHA-256 over the SHA-256 of the files, in the order of their names.
func (s Subject) Root() [sha256.Size]byte {
	h := sha256.New()
	for _, f := range s.sorted() {
		h.Write(f.SHA256[:])
	}
	return [sha256.Size]byte(h.Sum(nil))
}

func (s Subject) statement(predicateType string, predicate any) ([]byte, error) {
	root := s.Root()
	text, err := json.Marshal(statement{
		Type: statementType, PredicateType: predicateType, Predicate: predicate,
		Subject: []descriptor{{Name: s.Name, Digest: map[string]string{"sha256": hex.EncodeToString(root[:])}}},
	})
	if err != nil {
		return nil, fmt.Errorf("statement about %s: %w", s.Name, err)
	}
	return text, nil
}

// resource is a file in the predicate of Model Signing.
type resource struct {
	Name      string `json:"name"`
	Algorithm string `json:"algorithm"`
	Digest    string `json:"digest"`
}

// model is the predicate of Model Signing. Verifiers ignore the members after resources.
type model struct {
	Serialization struct {
		Method        string   `json:"method"`
		HashType      string   `json:"hash_type"`
		AllowSymlinks bool     `json:"allow_symlinks"`
		IgnorePaths   []string `json:"ignore_paths"`
	} `json:"serialization"`
	Resources []resource `json:"resources"`

	Origin       string            `json:"origin"`     // identity of the store
	Checkpoint   string            `json:"checkpoint"` // RUN/TRIAL@ID
	Sequence     uint64            `json:"sequence"`   // of checkpoint.committed in the log of the store
	Manifest     map[string]string `json:"manifest"`   // its digest
	Committed    time.Time         `json:"committed_at"`
	NotOfTheSave []string          `json:"not_of_checkpoint,omitempty"` // files that the checkpoint does not prove
}

// Model returns the statement of OpenSSF Model Signing v1.0 that the subject's files are
// those of the checkpoint.
func Model(s Subject, c Checkpoint) ([]byte, error) {
	m := model{
		Resources: []resource{}, Origin: c.Store, Checkpoint: c.Ref(), Sequence: c.Sequence,
		Manifest: c.digest(), Committed: c.Committed.UTC(),
	}
	m.Serialization.Method, m.Serialization.HashType, m.Serialization.IgnorePaths = "files", "sha256", []string{}
	for _, f := range s.sorted() {
		m.Resources = append(m.Resources, resource{Name: f.Name, Algorithm: "sha256", Digest: hex.EncodeToString(f.SHA256[:])})
		if f.Also {
			m.NotOfTheSave = append(m.NotOfTheSave, f.Name)
		}
	}
	return s.statement(modelType, m)
}

// provenance is the predicate SLSA provenance v1.
type provenance struct {
	BuildDefinition struct {
		BuildType            string         `json:"buildType"`
		ExternalParameters   map[string]any `json:"externalParameters"`
		InternalParameters   map[string]any `json:"internalParameters"`
		ResolvedDependencies []descriptor   `json:"resolvedDependencies"`
	} `json:"buildDefinition"`
	RunDetails struct {
		Builder struct {
			ID string `json:"id"`
		} `json:"builder"`
		Metadata struct {
			InvocationID string     `json:"invocationId,omitempty"`
			StartedOn    *time.Time `json:"startedOn,omitempty"`
			FinishedOn   *time.Time `json:"finishedOn,omitempty"`
		} `json:"metadata"`
		Byproducts []descriptor `json:"byproducts"`
	} `json:"runDetails"`
}

// dependency returns the descriptor of a checkpoint that another one follows from.
func (c Checkpoint) dependency() descriptor {
	d := descriptor{Name: c.Ref(), URI: c.uri(), Digest: c.digest(), Annotations: map[string]any{}}
	if c.Unresolved != "" {
		d.Annotations["unresolved"] = c.Unresolved
	} else {
		d.Annotations["sequence"] = c.Sequence
	}
	return d
}

// Provenance returns the SLSA provenance v1 of the subject: its checkpoint's job, with the
// parents as resolved dependencies.
func Provenance(s Subject, t Training) ([]byte, error) {
	c := t.Checkpoint
	var p provenance
	p.BuildDefinition.BuildType = buildType
	p.BuildDefinition.ExternalParameters = map[string]any{
		"run": c.Run, "trial": c.Trial, "command": listOf(t.Command), "flags": listOf(t.Flags), "resume": t.Resume, "config": t.Config,
		"nproc": t.NProc, "nnodes": t.NNodes,
	}
	if t.Config == nil {
		p.BuildDefinition.ExternalParameters["config"] = map[string]any{}
	}
	p.BuildDefinition.InternalParameters = map[string]any{
		"checkpoint": c.Ref(), "step": c.Step, "sequence": c.Sequence, "attempt": t.Attempt, "world_size": t.WorldSize, "host": t.Host,
	}
	p.BuildDefinition.ResolvedDependencies = []descriptor{}
	for _, parent := range t.Parents {
		p.BuildDefinition.ResolvedDependencies = append(p.BuildDefinition.ResolvedDependencies, parent.dependency())
	}
	p.RunDetails.Builder.ID = "urn:uuid:" + c.Store
	p.RunDetails.Metadata.InvocationID = t.Job
	p.RunDetails.Metadata.StartedOn, p.RunDetails.Metadata.FinishedOn = known(t.Started), known(c.Committed)
	made := c.dependency()
	made.Name = "manifest of " + c.Ref()
	p.RunDetails.Byproducts = []descriptor{made}
	for _, f := range s.sorted() {
		if f.Also {
			p.RunDetails.Byproducts = append(p.RunDetails.Byproducts, descriptor{
				Name: f.Name, Digest: map[string]string{"sha256": hex.EncodeToString(f.SHA256[:])}, Annotations: map[string]any{"not_of_checkpoint": true},
			})
		}
	}
	return s.statement(provenanceType, p)
}

func listOf(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}

func known(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}
