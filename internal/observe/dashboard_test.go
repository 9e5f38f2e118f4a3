package observe

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const (
	dashboardFile = "../../docs/observe/dashboard.json"
	alertsFile    = "../../docs/observe/alerts.yml"
	metricsPage   = "../../docs/reference/metrics.md"
	monitorPage   = "../../docs/howto/monitor.md"
)

// asked is one query of the dashboard or the alerts, with the texts that name its labels.
type asked struct {
	where, expr string
	texts       []string
}

// alert is one rule of the alerts.
type alert struct {
	Alert       string
	Expr        string
	For         string
	Labels      map[string]string
	Annotations map[string]string
}

func readAlerts(t *testing.T) (all []alert) {
	t.Helper()
	text, err := os.ReadFile(alertsFile)
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Groups []struct{ Rules []alert } }
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

func readPanels(t *testing.T) (all []asked) {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Panels []struct {
			Title, Type string
			Targets     []struct{ Expr, LegendFormat string }
		}
		Templating struct{ List []struct{ Name, Type string } }
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for _, p := range file.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q asks nothing", p.Title)
		}
		for _, q := range p.Targets {
			all = append(all, asked{"panel " + p.Title, strings.ReplaceAll(q.Expr, "$run", ".*"), []string{q.LegendFormat}})
		}
	}
	return all
}

func queries(t *testing.T) []asked {
	t.Helper()
	all := readPanels(t)
	for _, a := range readAlerts(t) {
		q := asked{"alert " + a.Alert, a.Expr, nil}
		for _, text := range a.Annotations {
			q.texts = append(q.texts, text)
		}
		all = append(all, q)
	}
	return all
}

var (
	selector = regexp.MustCompile(`\b(ckptstore_\w+)(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)`)
	grouping = regexp.MustCompile(`\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)`)
	inText   = regexp.MustCompile(`\{\{[^}]*?\$labels\.(\w+)|\{\{(\w+)\}\}`)
)

// served returns the labels of a metric as a query names it.
func served(name string) (labels []string, ok bool) {
	for _, f := range families() {
		for _, suffix := range suffixes[f.kind] {
			if name == prefix+f.name+suffix {
				labels = slices.Clone(f.labels)
				if suffix == "_bucket" {
					labels = append(labels, "le")
				}
				return labels, true
			}
		}
	}
	return nil, false
}

var suffixes = map[string][]string{
	"gauge": {""}, "counter": {""}, "histogram": {"_bucket", "_sum", "_count"}, "summary": {"_sum", "_count"},
}

// wrong lists what a query names that /metrics does not serve.
func (q asked) wrong() (problems []string) {
	found := selector.FindAllStringSubmatch(q.expr, -1)
	if len(found) == 0 {
		problems = append(problems, "it names no metric")
	}
	known := []string{"alertname"}
	for _, m := range found {
		labels, ok := served(m[1])
		if !ok {
			problems = append(problems, "no metric "+m[1])
			continue
		}
		known = append(known, labels...)
		for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
			if !slices.Contains(labels, l[1]) {
				problems = append(problems, fmt.Sprintf("%s has no label %s", m[1], l[1]))
			}
		}
	}
	for _, g := range grouping.FindAllStringSubmatch(q.expr, -1) {
		for _, l := range strings.FieldsFunc(g[1], func(r rune) bool { return r == ',' || r == ' ' }) {
			if !slices.Contains(known, l) {
				problems = append(problems, "no metric of it has the label "+l)
			}
		}
	}
	for _, text := range q.texts {
		for _, l := range inText.FindAllStringSubmatch(text, -1) {
			if name := l[1] + l[2]; !slices.Contains(known, name) {
				problems = append(problems, fmt.Sprintf("the text %q has the label %s", text, name))
			}
		}
	}
	return problems
}

// TestQueriesNameServedMetrics checks that the dashboard and the alerts name only metrics and
// labels that /metrics serves.
func TestQueriesNameServedMetrics(t *testing.T) {
	t.Parallel()
	all := queries(t)
	if len(all) < 30 {
		t.Errorf("%d queries", len(all))
	}
	for _, q := range all {
		for _, problem := range q.wrong() {
			t.Errorf("%s: %s: %s", q.where, q.expr, problem)
		}
	}
	for _, bad := range []asked{
		{expr: `ckptstore_run_stepp`},
		{expr: `ckptstore_run_step{rank="0"}`},
		{expr: `sum by (rank) (ckptstore_run_step)`},
		{expr: `ckptstore_saves_total_bucket`},
		{expr: `ckptstore_run_step`, texts: []string{"{{node}}"}},
		{expr: `ckptstore_run_step`, texts: []string{"{{ reReplaceAll \"a\" \"b\" $labels.node }}"}},
	} {
		if len(bad.wrong()) == 0 {
			t.Errorf("%+v passes", bad)
		}
	}
}

// TestAlertsHaveRunbooks checks that each alert links to a section of the page about
// monitoring that has its command, and quotes names in it.
func TestAlertsHaveRunbooks(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(monitorPage)
	if err != nil {
		t.Fatal(err)
	}
	anchors := map[string]bool{}
	for line := range strings.Lines(string(page)) {
		if title, ok := strings.CutPrefix(line, "### "); ok {
			anchors[strings.ToLower(strings.ReplaceAll(strings.TrimSpace(title), " ", "-"))] = true
		}
	}
	alerts := readAlerts(t)
	for _, a := range alerts {
		link, anchor, _ := strings.Cut(a.Annotations["runbook_url"], "#")
		if !strings.HasSuffix(link, "/docs/howto/monitor.md") || !anchors[anchor] {
			t.Errorf("%s links to %s, which does not exist", a.Alert, a.Annotations["runbook_url"])
		}
		if a.Annotations["command"] == "" || a.Annotations["summary"] == "" || a.Annotations["description"] == "" || a.Labels["severity"] == "" {
			t.Errorf("%s: %+v", a.Alert, a)
		}
		// The name of a run may be anything, and people paste the command.
		if c := a.Annotations["command"]; strings.Contains(c, "$labels.run") && !strings.Contains(c, `'{{ reReplaceAll "'" "'\\''" $labels.run }}'`) {
			t.Errorf("%s does not quote the name in %q", a.Alert, c)
		}
	}
	if len(alerts) != len(anchors) {
		t.Errorf("%d alerts, %d sections", len(alerts), len(anchors))
	}
}

// TestMetricsPage checks that the reference page lists exactly the metrics that are served. Run
// with -update to write it.
func TestMetricsPage(t *testing.T) {
	t.Parallel()
	old, err := os.ReadFile(metricsPage)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString("<!-- metrics: begin -->\n| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, f := range families() {
		labels := strings.Join(f.labels, "`, `")
		if labels != "" {
			labels = "`" + labels + "`"
		}
		fmt.Fprintf(&b, "| `%s%s` | %s | %s | %s |\n", prefix, f.name, f.kind, labels, f.help)
	}
	b.WriteString("<!-- metrics: end -->")
	head, rest, ok := strings.Cut(string(old), "<!-- metrics: begin -->")
	_, tail, ok2 := strings.Cut(rest, "<!-- metrics: end -->")
	if !ok || !ok2 {
		t.Fatalf("%s has no marks", metricsPage)
	}
	page := head + b.String() + tail
	if page == string(old) {
		return
	}
	if !*update {
		t.Fatalf("%s is stale: run `go test ./internal/observe -run TestMetricsPage -update`", filepath.Clean(metricsPage))
	}
	if err := os.WriteFile(metricsPage, []byte(page), 0o644); err != nil {
		t.Fatal(err)
	}
}
