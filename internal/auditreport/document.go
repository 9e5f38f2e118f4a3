package auditreport

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/terminal"
)

// describe returns what a decision is about, and what it decided.
func describe(body events.Body) (subject, detail string) {
	switch b := body.(type) {
	case *events.TrialCreated:
		if b.Parent != nil {
			return "", "forked from " + events.CheckpointRef(*b.Parent).String()
		}
		return "", "created"
	case *events.GroupStarted:
		detail = fmt.Sprintf("%d ranks", b.WorldSize)
		if b.Resume != "" {
			detail += ", continues " + b.Resume
		}
		return attempt(b.Attempt), detail
	case *events.GroupCoordinator:
		return attempt(b.Attempt), fmt.Sprintf("node %d coordinates: %s", b.Node, b.Reason)
	case *events.TrialStopRequested:
		if b.Preempt {
			return "", "save, then stop: " + b.Reason
		}
		return "", "stop: " + b.Reason
	case *events.TrialPaused:
		return attempt(b.Attempt), b.Reason
	case *events.TrialCompleted:
		return attempt(b.Attempt), ""
	case *events.TrialErrored:
		return attempt(b.Attempt), b.Message
	case *events.RestoreBegun:
		if b.From != "" {
			return b.From + "@" + b.Checkpoint, fmt.Sprintf("load %d of attempt %d", b.Load, b.Attempt)
		}
		return b.Checkpoint, fmt.Sprintf("load %d of attempt %d", b.Load, b.Attempt)
	case *events.Void:
		return "", "not a valid event: " + b.Why
	}
	return describeCheckpoint(body)
}

// describeCheckpoint is describe for decisions about a checkpoint.
func describeCheckpoint(body events.Body) (subject, detail string) {
	switch b := body.(type) {
	case *events.CheckpointBegun:
		return b.Checkpoint, fmt.Sprintf("step %d, %d ranks", b.Step, len(b.All()))
	case *events.CheckpointStaged:
		return b.Checkpoint, ""
	case *events.CheckpointCommitted:
		return b.Checkpoint, fmt.Sprintf("%s, manifest %s", bytesize.Text(b.Bytes), b.Manifest)
	case *events.CheckpointAborted:
		return b.Checkpoint, b.Reason
	case *events.CheckpointSuperseded:
		return b.Checkpoint, b.Reason
	case *events.CheckpointPinned:
		return b.Checkpoint, b.Reason
	case *events.CheckpointUnpinned:
		return b.Checkpoint, ""
	case *events.CheckpointTagged:
		return b.Checkpoint, b.Tag
	case *events.CheckpointUntagged:
		return b.Checkpoint, b.Tag
	case *events.CheckpointAttached:
		return b.Checkpoint, fmt.Sprintf("%s, %s, digest %s", b.Name, bytesize.Text(b.Size), b.Digest)
	case *events.CheckpointDeleted:
		return b.Checkpoint, b.Reason
	}
	return "", ""
}

func attempt(n int) string { return fmt.Sprintf("attempt %d", n) }

// document is a report as text: the same for all forms that people read.
type document struct {
	Title    string
	Facts    []fact
	Sections []section
}

type fact struct{ Name, Value string }

type section struct {
	Title   string
	Note    string // in place of rows, if there are none
	Columns []column
	Rows    [][]string
}

// column is a column of a table, and how its cells are shown.
type column struct {
	Name string
	As   string // "", "code", "number", "time" or "long"
}

func columns(names ...string) (out []column) {
	for _, name := range names {
		name, as, _ := strings.Cut(name, ":")
		out = append(out, column{name, as})
	}
	return out
}

// text returns a value within one line, without characters that hide or reorder others.
func text(v any) string { return terminal.Line(fmt.Sprint(v)) }

func when(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format("2006-01-02 15:04:05Z")
}

func sequence(n uint64) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

func orDash(s string) string { return cmp.Or(text(s), "-") }

func (b By) text() string {
	switch {
	case b.Principal == "":
		return orDash(b.Source)
	case b.Source == "":
		return text(b.Principal)
	}
	return text(b.Principal + " (" + b.Source + ")")
}

// document returns the report as text.
func (r Report) document() document {
	d := document{Title: "Audit report of run " + text(r.Run)}
	committed, deleted := 0, 0
	for _, c := range r.Checkpoints {
		if c.Sequence > 0 {
			committed++
		}
		if c.DeletedSeq > 0 {
			deleted++
		}
	}
	d.Facts = []fact{
		{"Store", text(r.Store)},
		{"Run", text(r.Run)},
		{"As of", fmt.Sprintf("event %d, stored %s", r.AsOf, when(r.AsOfStored))},
		{"Newest head", text(r.Proven)},
		{"Jobs", fmt.Sprint(len(r.Jobs))},
		{"Decisions", fmt.Sprint(len(r.Decisions))},
		{"Checkpoints", fmt.Sprintf("%d begun, %d committed, %d deleted", len(r.Checkpoints), committed, deleted)},
		{"Loads", fmt.Sprint(len(r.Restores))},
		{"Signatures", text(r.Signatures.Text())},
	}
	if r.Head != nil {
		d.Facts = slices.Insert(d.Facts, 4, fact{"Checked", "the signature of the head, by the key that the store names; not the log against its root, which ckptstore audit verify --policy checks"})
	}
	d.Sections = []section{r.jobs(), r.trials(), r.attempts(), r.origins(), r.checkpoints(), r.restores(), r.counts(), r.decisions(), r.signatures(), r.access(), r.keys()}
	return d
}

func (r Report) jobs() section {
	s := section{Title: "Jobs", Note: "The run has no job.", Columns: columns("Started:time", "Event:number", "Job:code", "By:long", "Host", "Command:code", "Ended:time", "Exit")}
	for _, j := range r.Jobs {
		exit := "no end in the log"
		if j.EndedSeq > 0 {
			if exit = fmt.Sprint(j.ExitCode); j.Reason != "" {
				exit += ": " + text(j.Reason)
			}
		}
		s.Rows = append(s.Rows, []string{
			when(j.Started), sequence(j.Sequence), text(j.ID), j.By.text(), text(fmt.Sprintf("%s, process %d", j.Host, j.PID)), text(strings.Join(append(slices.Clone(j.Flags), j.Command...), " ")), when(j.Ended), exit,
		})
	}
	return s
}

func (r Report) trials() section {
	s := section{Title: "Trials", Note: "The run has no trial.", Columns: columns("Trial", "Created:time", "Event:number", "Forked from:code", "Status", "Line ends at:code", "Reports:number", "Configuration:code")}
	for _, t := range r.Trials {
		status := t.Status
		if t.Message != "" {
			status += ": " + t.Message
		}
		config, err := json.Marshal(t.Config)
		if err != nil {
			config = []byte(err.Error())
		}
		s.Rows = append(s.Rows, []string{
			text(t.Name), when(t.Created), sequence(t.Sequence), orDash(t.Parent), text(status), orDash(t.Head), fmt.Sprint(t.Reports), text(string(config)),
		})
	}
	return s
}

func (r Report) attempts() section {
	s := section{Title: "Attempts", Note: "No attempt was started.", Columns: columns("Started:time", "Event:number", "Trial", "Attempt:number", "Job:code", "Ranks:number", "Continues:code", "Stopped:time", "Reason:long")}
	for _, t := range r.Trials {
		for _, a := range t.Attempts {
			s.Rows = append(s.Rows, []string{
				when(a.Started), sequence(a.Sequence), text(t.Name), fmt.Sprint(a.Attempt), text(a.Job), fmt.Sprint(a.WorldSize), orDash(a.Resume), when(a.Stopped), orDash(a.Reason),
			})
		}
	}
	return s
}

func (r Report) origins() section {
	s := section{
		Title: "Origins outside of the run", Note: "The run follows from no other run and no other program.",
		Columns: columns("Of", "How", "Checkpoint:code", "State", "Event:number", "Size:number", "Manifest:code"),
	}
	for _, o := range r.Origins {
		ref, state := text(o.Ref), text(o.State)
		switch {
		case o.Unknown != "":
			state = text(o.Unknown)
		case o.Ref == "":
			ref = text(cmp.Or(o.From, "job "+o.Job))
		}
		size := "-"
		if o.Bytes > 0 {
			size = bytesize.Text(o.Bytes)
		}
		s.Rows = append(s.Rows, []string{text(o.Of), o.How, ref, orDash(state), sequence(o.Sequence), size, orDash(o.Manifest)})
	}
	return s
}

func (r Report) checkpoints() section {
	s := section{
		Title: "Checkpoints", Note: "No checkpoint was begun.",
		Columns: columns("Checkpoint:code", "Step:number", "State", "Begun:time", "Event:number", "Ended:time", "Commit:number", "Continues:code", "Size:number", "Manifest:code", "Marks:long"),
	}
	for _, c := range r.Checkpoints {
		marks := slices.Clone(c.Tags)
		if c.Pinned {
			marks = append(marks, "pinned")
		}
		if c.DeletedSeq > 0 {
			marks = append(marks, fmt.Sprintf("deleted at event %d", c.DeletedSeq))
		}
		if c.Reason != "" {
			marks = append(marks, c.Reason)
		}
		s.Rows = append(s.Rows, []string{
			text(c.Trial + "@" + c.ID), fmt.Sprint(c.Step), c.State, when(c.Begun), sequence(c.BegunSeq), when(c.Ended), sequence(c.Sequence),
			orDash(c.Parent), bytesize.Text(c.Bytes), orDash(c.Manifest), orDash(strings.Join(marks, ", ")),
		})
	}
	return s
}

func (r Report) restores() section {
	s := section{
		Title: "Loads", Note: "The run loaded no checkpoint.",
		Columns: columns("Begun:time", "Event:number", "By:long", "Attempt", "Checkpoint:code", "Outcome", "Read:number", "From"),
	}
	for _, l := range r.Restores {
		outcome := l.Outcome
		if l.Error != "" {
			outcome += ": " + text(l.Error)
		}
		s.Rows = append(s.Rows, []string{
			when(l.Begun), sequence(l.Sequence), l.By.text(), text(fmt.Sprintf("%s, attempt %d", l.Trial, l.Attempt)), text(l.Checkpoint), outcome, bytesize.Text(l.Bytes), orDash(l.Tier),
		})
	}
	return s
}

// counts are the decisions by kind.
func (r Report) counts() section {
	s := section{Title: "Decisions by kind", Note: "The run has no decision.", Columns: columns("Kind:code", "Number:number")}
	count := map[string]int{}
	for _, d := range r.Decisions {
		count[d.Kind]++
	}
	for kind, n := range count {
		s.Rows = append(s.Rows, []string{text(kind), fmt.Sprint(n)})
	}
	slices.SortFunc(s.Rows, func(a, b []string) int { return cmp.Compare(a[0], b[0]) })
	return s
}

func (r Report) decisions() section {
	s := section{Title: "Decisions", Note: "The run has no decision.", Columns: columns("Event:number", "Stored:time", "By:long", "Trial", "Decision:code", "Of:code", "Detail:long", "Signed by:code")}
	for _, d := range r.Decisions {
		signer := orDash(d.Signer)
		if d.Signer != "" && d.Signature != audit.Signed {
			signer += ": " + string(d.Signature)
		}
		s.Rows = append(s.Rows, []string{sequence(d.Sequence), when(d.Stored), d.By.text(), text(d.Trial), text(d.Kind), orDash(d.Subject), orDash(d.Detail), signer})
	}
	return s
}

// signatures are the decisions whose signature does not hold.
func (r Report) signatures() section {
	s := section{Title: "Signatures that do not hold", Note: "None.", Columns: columns("Event:number", "State", "Key:code", "Problem:long")}
	for _, f := range r.Signatures.Findings {
		s.Rows = append(s.Rows, []string{sequence(f.Sequence), string(f.State), orDash(f.Key), text(f.Problem)})
	}
	return s
}

// keys are the keys that sign decisions.
func (r Report) keys() section {
	s := section{
		Title: "Keys that sign decisions", Note: "The log grants no key.",
		Columns: columns("Key:code", "User", "Role", "Runs", "Granted:number", "Until"),
	}
	for _, g := range r.Keys {
		until := "it is revoked"
		switch {
		case g.Until > 0:
			until = fmt.Sprintf("event %d", g.Until)
		case !g.Expires.IsZero():
			until = when(g.Expires)
		}
		s.Rows = append(s.Rows, []string{text(g.Key), text(g.User), text(g.Role), text(cmp.Or(strings.Join(g.Runs, ", "), "all")), sequence(g.Since), until})
	}
	return s
}

// access is who was given access to the store, and who lost it.
func (r Report) access() section {
	s := section{
		Title: "Access to the store", Note: "The log has no grant of access to the store.",
		Columns: columns("Event:number", "Stored:time", "By:long", "User", "Access", "Token or key:code", "Until"),
	}
	for _, a := range r.Access {
		by := a.By.text()
		if a.Stated != "" {
			by += text(", as " + a.Stated)
		}
		what, until := "revoked", "-"
		if a.Kind == string(events.AccessGranted{}.Kind()) {
			what, until = text(a.Role), text(cmp.Or(a.Expires, "it is revoked"))
		}
		if a.Kind == string(events.AccessGranted{}.Kind()) && len(a.Hashes)+len(a.Keys) == 0 {
			what, until = "none", "-"
		}
		if len(a.Require) > 0 {
			what += text(fmt.Sprintf("; decisions of runs %s must be signed", strings.Join(a.Require, ", ")))
			if a.Kind != string(events.AccessGranted{}.Kind()) {
				what += " no longer"
			}
		}
		if a.Invalid != "" {
			what += text("; no effect: " + a.Invalid)
		}
		s.Rows = append(s.Rows, []string{sequence(a.Sequence), when(a.Stored), by, text(a.User), what, text(strings.TrimSpace(strings.Join(append(append([]string{a.Token}, a.Hashes...), a.Keys...), " "))), until})
	}
	return s
}

// JSON writes the report as one object.
func (r Report) JSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// Markdown writes the report in GitHub's Markdown. Text from the log is escaped: it is never
// markup, a link or a second row.
func (r Report) Markdown(w io.Writer) error {
	d := r.document()
	out := &printer{w: w}
	out.print("# " + escaped(d.Title) + "\n\n")
	out.row("", "")
	out.row("---", "---")
	for _, f := range d.Facts {
		out.row(f.Name, escaped(f.Value))
	}
	for _, s := range d.Sections {
		out.print("\n## " + s.Title + "\n\n")
		if len(s.Rows) == 0 {
			out.print(s.Note + "\n")
			continue
		}
		var names, marks []string
		for _, c := range s.Columns {
			names = append(names, c.Name)
			mark := "---"
			if c.As == "number" {
				mark = "--:"
			}
			marks = append(marks, mark)
		}
		out.row(names...)
		out.row(marks...)
		for _, cells := range s.Rows {
			safe := make([]string, len(cells))
			for i, cell := range cells {
				safe[i] = escaped(cell)
			}
			out.row(safe...)
		}
	}
	return out.err
}

// markup are the characters that Markdown gives a meaning, and what shows them.
var markup = strings.NewReplacer(
	`\`, `\\`, "`", "\\`", `*`, `\*`, `_`, `\_`, `[`, `\[`, `]`, `\]`, `|`, `\|`, `~`, `\~`, `#`, `\#`, `!`, `\!`,
	`<`, `&lt;`, `>`, `&gt;`, `&`, `&amp;`, `://`, `&#58;//`, `www.`, `www&#46;`,
)

func escaped(s string) string { return markup.Replace(s) }

// printer keeps the first error of writes.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) print(s string) {
	if p.err == nil {
		_, p.err = io.WriteString(p.w, s)
	}
}

func (p *printer) row(cells ...string) { p.print("| " + strings.Join(cells, " | ") + " |\n") }
