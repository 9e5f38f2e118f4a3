package audit

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"github.com/transparency-dev/formats/witness"
	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrPolicy reports a head that lacks the signatures that a policy wants.
var ErrPolicy = problem.New(problem.Policy, "policy not met")

// Policy names the logs whose heads a verifier accepts, and the witnesses that must have
// cosigned them. Its text has the form of C2SP tlog-policy:
//
//	log LOGKEY
//	witness NAME KEY URL
//	group NAME any|all|N MEMBER…
//	quorum NAME, or quorum none
//
// Two kinds of lines are of ckptstore:
//
//	signer KEY       the key of an admin, who decides which keys sign decisions
//	signed PATTERN   the decisions of runs that match must be signed
type Policy struct {
	Logs      []note.Verifier
	Witnesses witness.Group
	Signers   []string // verifier keys; none: the first key that the log grants counts
	Signed    []string // patterns of [path.Match]
}

// WantsSignatures reports whether the policy is about signatures of decisions.
func (p Policy) WantsSignatures() bool { return p.Signers != nil || p.Signed != nil }

// ParsePolicy parses the text of a policy. It refuses a policy in which one key counts
// more than once, as C2SP tlog-policy wants.
func ParsePolicy(text string) (p Policy, err error) {
	text, err = p.signatures(text)
	if err != nil {
		return p, problem.Errorf(problem.Invalid, "policy: %w", err)
	}
	p.Witnesses, err = witness.ParsePolicy([]byte(text))
	if err != nil {
		return p, problem.Errorf(problem.Invalid, "policy: %w", err)
	}
	counted := counted{}
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if err := counted.once(fields); err != nil {
			return p, problem.Errorf(problem.Invalid, "policy: %q: %w", strings.TrimSpace(line), err)
		}
		if fields[0] != "log" {
			continue
		}
		v, err := note.NewVerifier(fields[1])
		if err != nil {
			return p, problem.Errorf(problem.Invalid, "policy: log %s: %w", fields[1], err)
		}
		p.Logs = append(p.Logs, v)
	}
	return p, nil
}

// signatures takes the lines about signatures of decisions, and returns the others.
func (p *Policy) signatures(text string) (others string, err error) {
	var out strings.Builder
	for line := range strings.Lines(text) {
		bare, _, _ := strings.Cut(line, "#")
		fields := strings.Fields(bare)
		if !SignatureLine(line) {
			out.WriteString(line)
			continue
		}
		if len(fields) != 2 {
			return "", fmt.Errorf("%q: want `signer KEY` or `signed PATTERN`", strings.TrimSpace(line))
		}
		if fields[0] == "signed" {
			if bad := badPattern(fields[1:]); bad != "" {
				return "", fmt.Errorf("%s is no pattern of runs", bad)
			}
			p.Signed = append(p.Signed, fields[1])
			continue
		}
		if _, err := note.NewVerifier(fields[1]); err != nil {
			return "", fmt.Errorf("signer %s: %w", fields[1], err)
		}
		p.Signers = append(p.Signers, fields[1])
	}
	return out.String(), nil
}

// SignatureLine reports whether a line of a policy is about signatures of decisions.
func SignatureLine(line string) bool {
	line, _, _ = strings.Cut(line, "#")
	fields := strings.Fields(line)
	return len(fields) > 0 && (fields[0] == "signer" || fields[0] == "signed")
}

// counted has what the lines of a policy may name only once. The library does not look.
type counted map[string]bool

// once refuses a line that names a key, an address, a member or a quorum again. Otherwise
// one witness would count as several, or be left out without a word.
func (c counted) once(fields []string) error {
	add := func(what, value string) error {
		if c[what+" "+value] {
			return fmt.Errorf("%s %s appears twice", what, value)
		}
		c[what+" "+value] = true
		return nil
	}
	switch fields[0] {
	case "log":
		if len(fields) < 2 {
			return errors.New("want `log KEY`")
		}
		return add("key", publicKey(fields[1]))
	case "witness":
		if err := add("key", publicKey(fields[2])); err != nil {
			return err
		}
		return add("URL", strings.TrimRight(fields[3], "/"))
	case "group":
		if strings.Trim(fields[2], "0") == "" {
			return errors.New("a group that wants 0 of its members is met without a cosignature: want at least 1, or `quorum none`")
		}
		if len(fields) == 3 {
			return errors.New("the group has no member")
		}
		for _, member := range fields[3:] {
			if err := add("member", member); err != nil {
				return err
			}
		}
	case "quorum":
		return add("the line", "quorum")
	}
	return nil
}

// publicKey returns the part of a verifier key that does not depend on its name and type,
// or the text itself if it is no verifier key.
func publicKey(key string) string {
	parts := strings.SplitN(key, "+", 3)
	if len(parts) < 3 {
		return key
	}
	data, err := base64.StdEncoding.DecodeString(parts[2])
	if err != nil || len(data) < 2 {
		return key
	}
	return base64.StdEncoding.EncodeToString(data[1:])
}

// Unwitnessed reports whether a head without any cosignature meets the policy.
func (p Policy) Unwitnessed() bool { return p.Witnesses.Satisfied(nil) }

// Open returns the head of a note that a log of the policy has signed and its witnesses
// have cosigned. Its error matches [ErrPolicy] where a cosignature is missing, also where
// the policy wants none and the caller does not accept that.
func (p Policy) Open(signed []byte, acceptUnwitnessed bool) (Head, error) {
	if len(p.Logs) == 0 {
		return Head{}, fmt.Errorf("%w: the policy names no log: add a line `log KEY`", ErrPolicy)
	}
	h, err := OpenHead(signed, p.Logs...)
	if err != nil {
		return h, err
	}
	if p.Unwitnessed() && !acceptUnwitnessed {
		return h, fmt.Errorf("%w: the policy has no witness, so the owner of the log may have shown others another log: add witnesses, or pass --unwitnessed", ErrPolicy)
	}
	if !p.Witnesses.Satisfied(signed) {
		return h, fmt.Errorf("%w: the head (%v) lacks cosignatures: the policy wants %d of its quorum", ErrPolicy, h, p.Witnesses.N)
	}
	return h, nil
}
