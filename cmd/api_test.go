package cmd_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/api"
	"github.com/ckptstore/ckptstore/internal/observe"
	"github.com/ckptstore/ckptstore/internal/store"
)

// served is a process that serves a store over HTTP.
type served struct {
	t     *testing.T
	store string // --store=…
	url   string // without the last slash
	token string
	cmd   *exec.Cmd
	done  chan struct{}
}

// serveHTTP starts `ckptstore serve --http`.
func serveHTTP(t *testing.T, dir, address string, more ...string) *served {
	t.Helper()
	s := &served{t: t, store: "--store=" + dir, done: make(chan struct{})}
	s.start(address, more...)
	t.Cleanup(s.kill)
	var link struct {
		Link    string
		Running bool
	}
	decode(t, output(t, 0, "ckptstore", "ui", "--json", s.store), &link)
	if !link.Running {
		t.Fatalf("ui does not find the server: %+v", link)
	}
	_, s.token, _ = strings.Cut(link.Link, "token=")
	return s
}

var httpAt = regexp.MustCompile(`HTTP API at (\S+)/;`)

func (s *served) start(address string, more ...string) {
	s.t.Helper()
	out := &watched{text: "HTTP API at ", seen: make(chan struct{})}
	s.cmd = exec.CommandContext(s.t.Context(), "ckptstore", append([]string{"serve", s.store, "--http", address}, more...)...)
	s.cmd.Stderr = out
	s.done = make(chan struct{})
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	cmd, done := s.cmd, s.done
	go func() { _ = cmd.Wait(); close(done) }()
	select {
	case <-out.seen:
	case <-done:
		s.t.Fatalf("serve ended: %s", out.String())
	case <-time.After(time.Minute):
		s.t.Fatalf("serve does not serve: %s", out.String())
	}
	m := httpAt.FindStringSubmatch(out.String())
	if m == nil {
		s.t.Fatalf("serve prints no address: %s", out.String())
	}
	if s.url == "" { // later ones are at the same address, which clients read meanwhile
		s.url = m[1]
	}
}

// kill ends the server with SIGKILL.
func (s *served) kill() {
	_ = s.cmd.Process.Signal(syscall.SIGKILL)
	<-s.done
}

// ask reads a path of the API.
func (s *served) ask(path string) (status int, text string) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url+api.Prefix+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// command runs a command that reads the store, and returns its exit code and output.
func (s *served) command(args ...string) (code int, stdout, stderr string) {
	s.t.Helper()
	cmd := exec.CommandContext(s.t.Context(), "ckptstore", append(args, s.store)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		s.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// compared is a request that must have the answer of a command.
type compared struct {
	path    string
	command []string
	// change removes from both answers what only one has.
	change func(t *testing.T, ofAPI, ofCommand map[string]any)
}

// agrees compares an answer with that of a command.
func (s *served) agrees(c compared) {
	s.t.Helper()
	status, text := s.ask(c.path)
	code, out, errs := s.command(c.command...)
	if (status == http.StatusOK) != (code == 0) {
		s.t.Errorf("%s: %d %.300s\n%v: exit code %d: %s", c.path, status, text, c.command, code, errs)
		return
	}
	var ofAPI, ofCommand map[string]any
	decode(s.t, text, &ofAPI)
	if code != 0 {
		said := strings.TrimSpace(strings.TrimPrefix(errs, "ckptstore: "))
		if detail := fmt.Sprint(ofAPI["detail"]); !strings.HasSuffix(detail, said) {
			s.t.Errorf("%s: the detail %q\n%v prints %q", c.path, detail, c.command, said)
		}
		return
	}
	decode(s.t, out, &ofCommand)
	if c.change != nil {
		c.change(s.t, ofAPI, ofCommand)
	}
	if !reflect.DeepEqual(ofAPI, ofCommand) {
		s.t.Errorf("%s: %.2000s\n%v: %.2000s", c.path, text, c.command, out)
	}
}

// TestAPIEqualsCommands runs the demo and compares the API with the commands on its store: as it
// is now, and as of events chosen at random.
func TestAPIEqualsCommands(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "demo")
	output(t, 0, "trainer", "demo", "--json", "--dir", dir)
	s := serveHTTP(t, filepath.Join(dir, "store"), "127.0.0.1:0")
	var runs []string
	if status, text := s.ask("/runs"); status != http.StatusOK {
		t.Fatalf("runs: %d %s", status, text)
	} else {
		var list api.RunList
		decode(t, text, &list)
		for _, r := range list.Runs {
			runs = append(runs, r.Run)
		}
	}
	if len(runs) < 2 {
		t.Fatalf("runs: %q", runs)
	}
	for _, run := range runs {
		s.agrees(compared{"/runs/" + run + "/checkpoints?all=true&files=true&limit=1000", []string{"ls", run, "--all", "--json"}, nil})
		s.agrees(compared{"/runs/" + run + "/checkpoints?files=true&limit=1000", []string{"ls", run, "--json"}, nil})
		s.agrees(compared{"/runs/" + run + "/jobs", []string{"jobs", run, "--json"}, nil})
		s.agrees(compared{"/runs/" + run + "/nodes", []string{"nodes", run, "--json"}, nil})
		s.agrees(compared{"/runs/" + run + "/metrics?points=800", []string{"metrics", run, "--points=800", "--json"}, sameColumns})
		s.agrees(compared{"/runs/" + run + "/metrics?points=800&all=true", []string{"metrics", run, "--points=800", "--all", "--json"}, sameColumns})
		s.agrees(compared{"/runs/" + run + "/checkpoints/latest", []string{"show", run + "@latest", "--json"}, s.withTensors(run)})
		s.agrees(compared{"/runs/" + run + "/checkpoints/latest/reshard?ranks=5", []string{"show", run + "@latest", "--reshard=5", "--json"}, onlyReshard})
	}
	s.agrees(compared{"/diff?a=killed&b=reference", []string{"diff", "killed", "reference", "--json"}, nil})
	s.agrees(compared{"/diff?a=killed%40latest&b=reference%40latest", []string{"diff", "killed@latest", "reference@latest", "--json"}, nil})
	s.agrees(compared{"/diff?a=killed&b=reference%40latest", []string{"diff", "killed", "reference@latest", "--json"}, nil})
	s.agrees(compared{"/runs/killed/logs", []string{"logs", "killed", "--json"}, nil})
	s.agrees(compared{"/runs/killd/checkpoints", []string{"ls", "killd", "--json"}, nil})
	s.agrees(compared{"/runs/killed/checkpoints/nothing", []string{"show", "killed@nothing", "--json"}, nil})
	s.agrees(compared{"/runs/killed/metrics?metric=none", []string{"metrics", "killed", "--metric=none", "--points=800", "--json"}, nil})

	last := s.eventsAgree()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	moments := make([]moment, momentsOf(t))
	for i := range moments {
		moments[i] = moment{1 + r.IntN(last), runs[r.IntN(len(runs))]}
	}
	t.Run("moments", func(t *testing.T) {
		for part := range slices.Chunk(moments, (len(moments)+3)/4) {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				s := *s
				s.t = t
				for _, m := range part {
					s.agreesAsOf(m)
				}
			})
		}
	})

	// By its receipts, the store has the checkpoints of ls --offline.
	s.kill()
	byReceipts(t, filepath.Join(dir, "store"), s.store)
}

// TestLogsEqualCommand compares the output of a job in the API with that of the command.
func TestLogsEqualCommand(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	output(t, 0, "ckptstore", "init", "--store", dir)
	output(t, 0, "trainer", "run", "-q", "--store", dir, "--name", "loud", "--nproc", "2", "--", "sh", "-c", `for i in 1 2 3; do echo "out $i of $RANK"; echo "<b> $i" >&2; done`)
	s := serveHTTP(t, dir, "127.0.0.1:0")
	for query, flags := range map[string][]string{
		"lines=100": nil, "lines=4": {"--tail=4"}, "rank=1": {"--rank=1"}, "attempt=1&stream=err": {"--attempt=1", "--stderr"}, "stream=out&lines=2": {"--stdout", "--tail=2"},
	} {
		status, text := s.ask("/runs/loud/logs?" + query)
		var got struct{ Lines []any }
		decode(t, text, &got)
		_, out, errs := s.command(append([]string{"logs", "loud", "--json"}, flags...)...)
		var want []any
		for line := range strings.Lines(out) {
			var l any
			decode(t, line, &l)
			want = append(want, l)
		}
		if status != http.StatusOK || len(want) == 0 || !reflect.DeepEqual(got.Lines, want) {
			t.Errorf("%s: %d %s\nlogs %v: %s%s", query, status, text, flags, out, errs)
		}
	}
	s.agrees(compared{"/runs/loud/logs?job=none", []string{"logs", "loud", "--job=none", "--json"}, nil})
}

// moment is an event, and a run to ask about as of it.
type moment struct {
	seq int
	run string
}

// momentsEnv is how many random events the API and the commands are compared at.
const momentsEnv = "CKPTSTORE_TEST_MOMENTS"

func momentsOf(t *testing.T) int {
	t.Helper()
	text := os.Getenv(momentsEnv)
	if text == "" {
		return 20
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%s is not a number above 0", momentsEnv, text)
	}
	return n
}

func (s *served) agreesAsOf(m moment) {
	s.t.Helper()
	asOf, flag := fmt.Sprint("as_of=", m.seq), fmt.Sprint("--as-of=", m.seq)
	s.agrees(compared{"/runs/" + m.run + "/checkpoints?all=true&files=true&limit=1000&" + asOf, []string{"ls", m.run, "--all", "--json", flag}, nil})
	s.agrees(compared{"/runs/" + m.run + "/metrics?points=800&" + asOf, []string{"metrics", m.run, "--points=800", "--json", flag}, sameColumns})
	s.agrees(compared{"/diff?a=killed&b=reference&" + asOf, []string{"diff", "killed", "reference", "--json", flag}, nil})
}

// withTensors adds the tensors, which the API has at a path of their own.
func (s *served) withTensors(run string) func(*testing.T, map[string]any, map[string]any) {
	return func(t *testing.T, ofAPI, _ map[string]any) {
		t.Helper()
		_, text := s.ask("/runs/" + run + "/checkpoints/latest/tensors")
		var contents map[string]any
		decode(t, text, &contents)
		if n := fmt.Sprint(ofAPI["tensor_count"], " ", ofAPI["value_count"]); n != fmt.Sprint(len(contents["tensors"].([]any)), " ", len(contents["values"].([]any))) {
			t.Errorf("%s: %s tensors and values", run, n)
		}
		delete(ofAPI, "tensor_count")
		delete(ofAPI, "value_count")
		maps.Copy(ofAPI, contents)
	}
}

func onlyReshard(_ *testing.T, ofAPI, ofCommand map[string]any) {
	for _, m := range []map[string]any{ofAPI, ofCommand} {
		maps.DeleteFunc(m, func(name string, _ any) bool { return name != "reshard" })
	}
}

// sameColumns turns the rows of `metrics --json` into columns of six digits.
func sameColumns(t *testing.T, ofAPI, ofCommand map[string]any) {
	t.Helper()
	digits := func(v any) any {
		n, ok := v.(float64)
		if !ok {
			return nil
		}
		short, err := strconv.ParseFloat(strconv.FormatFloat(n, 'g', 6, 64), 64)
		if err != nil {
			t.Fatal(err)
		}
		return short
	}
	lines, index := []any{}, map[string]map[string]any{}
	line := func(key string, hidden bool) map[string]any {
		if index[key] == nil {
			index[key] = map[string]any{"hidden": hidden, "attempt": 0.0, "metrics": map[string]any{}, "texts": map[string]any{}}
			lines = append(lines, index[key])
		}
		return index[key]
	}
	line("", false)
	for _, one := range ofCommand["rows"].([]any) {
		row := one.(map[string]any)
		hidden, key := row["hidden"] == true, ""
		if hidden {
			key = fmt.Sprint(row["attempt"])
		}
		l := line(key, hidden)
		l["attempt"] = row["attempt"]
		for name, of := range row["metrics"].(map[string]any) {
			v := of.(map[string]any)
			add := func(group string, values map[string]any) {
				columns := l[group].(map[string]any)
				if columns[name] == nil {
					columns[name] = map[string]any{}
				}
				c := columns[name].(map[string]any)
				for member, value := range values {
					list, _ := c[member].([]any)
					c[member] = append(list, value)
				}
			}
			x := map[string]any{"x": row["until_iteration"], "step": row["step"]}
			if _, number := v["last"].(float64); !number && v["min"] == nil {
				x["last"] = v["last"]
				add("texts", x)
				continue
			}
			bad, _ := v["nans"].(float64)
			x["attempt"], x["min"], x["max"], x["last"], x["nonfinite"] = row["attempt"], digits(v["min"]), digits(v["max"]), digits(v["last"]), bad
			add("metrics", x)
		}
	}
	delete(ofCommand, "rows")
	ofCommand["lines"] = lines
	_ = ofAPI
}

// eventsAgree compares the pages of events with `events --json`, and returns the length of the
// log.
func (s *served) eventsAgree() int {
	s.t.Helper()
	_, out, _ := s.command("events", "--json")
	var want []any
	for line := range strings.Lines(out) {
		var e any
		decode(s.t, line, &e)
		want = append(want, e)
	}
	var got []any
	for next := ""; ; {
		_, text := s.ask("/events?first=true&limit=97&page=" + url.QueryEscape(next))
		var page struct {
			Events []any
			Next   string
		}
		decode(s.t, text, &page)
		got = append(got, page.Events...)
		if next = page.Next; next == "" {
			break
		}
	}
	if !reflect.DeepEqual(got, want) {
		s.t.Errorf("%d events in pages, %d lines", len(got), len(want))
	}
	return len(want)
}

// byReceipts serves a store that this process cannot write.
func byReceipts(t *testing.T, dir, flag string) {
	t.Helper()
	st, err := store.OpenByReceipts(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	}()
	observed := observe.Handler(st, observe.Options{})
	h := api.New(st, api.Options{Users: api.Users{api.NewUser("me", api.Admin, "secret")}, Observe: observed})
	defer h.Close()
	for path, want := range map[string]int{"/metrics": http.StatusOK, "/healthz": http.StatusOK, "/readyz": http.StatusServiceUnavailable} {
		w := httptest.NewRecorder()
		if observed.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)); w.Code != want {
			t.Errorf("%s of receipts: %d %s", path, w.Code, w.Body)
		}
	}
	ask := func(method, path string) (status int, answer map[string]any) {
		w := httptest.NewRecorder()
		req := httptest.NewRequestWithContext(t.Context(), method, "http://localhost"+api.Prefix+path, nil)
		req.Header.Set("Authorization", "Bearer secret")
		h.ServeHTTP(w, req)
		decode(t, w.Body.String(), &answer)
		return w.Code, answer
	}
	var offline struct {
		Checkpoints []struct{ Run, ID, Manifest string }
	}
	decode(t, output(t, 0, "ckptstore", "ls", "--offline", "--json", flag), &offline)
	var want, got []string
	runs := map[string]bool{}
	for _, c := range offline.Checkpoints {
		want = append(want, c.Run+"@"+c.ID+" "+c.Manifest)
		runs[c.Run] = true
	}
	for run := range runs {
		status, answer := ask("GET", "/runs/"+run+"/checkpoints?all=true&limit=1000")
		if status != http.StatusOK || answer["offline"] != true {
			t.Fatalf("checkpoints of %s: %d %v", run, status, answer)
		}
		for _, c := range answer["checkpoints"].([]any) {
			m := c.(map[string]any)
			got = append(got, fmt.Sprint(m["run"], "@", m["id"], " ", m["manifest"]))
		}
		if status, answer := ask("GET", "/runs/"+run+"/checkpoints/latest"); status != http.StatusOK || answer["problem"] != nil || answer["tensor_count"] == 0.0 {
			t.Errorf("%s@latest: %d %v", run, status, answer)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) || len(want) == 0 {
		t.Errorf("by receipts: %q\nls --offline: %q", got, want)
	}
	if status, answer := ask("GET", "/runs"); status != http.StatusOK || len(answer["runs"].([]any)) != len(runs) {
		t.Errorf("runs: %d %v", status, answer)
	}
	if status, answer := ask("GET", "/store"); status != http.StatusOK || answer["read_only"] != true {
		t.Errorf("store: %d %v", status, answer)
	}
	for _, c := range [][2]string{{"GET", "/events"}, {"GET", "/stream"}, {"GET", "/events/1"}, {"GET", "/runs?as_of=1"}, {"PUT", "/runs/killed/checkpoints/latest/pin"}, {"POST", "/runs/killed:stop"}} {
		if status, answer := ask(c[0], c[1]); status != http.StatusForbidden || !strings.Contains(fmt.Sprint(answer["detail"]), "cannot be written here") {
			t.Errorf("%s %s: %d %v", c[0], c[1], status, answer)
		}
	}
}

// TestStreamSurvivesOwners: the process that owns the store and serves it is killed twenty
// times. Seven clients reconnect, and get each event once, in order; an eighth reads nothing.
func TestStreamSurvivesOwners(t *testing.T) {
	t.Parallel()
	const kills, clients = 20, 7
	dir := filepath.Join(t.TempDir(), "store")
	output(t, 0, "ckptstore", "init", "--store", dir)
	address, err := freeEndpoint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := serveHTTP(t, dir, address)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	stalled, err := s.open(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer stalled.Body.Close()
	until := make(chan int) // closed with the last sequence
	last := 0
	type result struct {
		got     []int
		streams int
		err     error
	}
	results := make(chan result, clients)
	for range clients {
		go func() {
			var r result
			r.got, r.streams, r.err = s.readAll(ctx, until, &last)
			results <- r
		}()
	}
	save := func(run string, i int) {
		output(t, 0, "ckptstore", "import", filepath.Join("..", "internal", "format", "dcp", "testdata", "torch-2.14", "single_nested"),
			"--run", fmt.Sprintf("%s-%d", run, i), "--step=1", "--quiet", "--in-place", s.store)
	}
	for n := range kills {
		for i := range 3 {
			save(fmt.Sprintf("r-%d", n), i)
		}
		s.kill()
		s.start(address)
	}
	_, text := s.ask("/store")
	var about api.Store
	decode(t, text, &about)
	last = int(about.Sequence)
	close(until)
	save("wakes", 0) // the clients that have everything
	for range clients {
		r := <-results
		if r.err != nil || len(r.got) != last {
			t.Errorf("a client got %d events of %d by %d streams: %v", len(r.got), last, r.streams, r.err)
			continue
		}
		for i, seq := range r.got {
			if seq != i+1 {
				t.Errorf("event %d is %d", i+1, seq)
				break
			}
		}
		if r.streams < 2 {
			t.Errorf("a client had %d streams", r.streams)
		}
	}
}

// open begins a stream after a sequence.
func (s *served) open(ctx context.Context, after int) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+api.Prefix+"/stream", nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	req.Header.Set("Last-Event-ID", strconv.Itoa(after))
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err == nil && resp.StatusCode != http.StatusOK {
		_ = resp.Body.Close()
		return nil, fmt.Errorf("stream after %d: %s", after, resp.Status)
	}
	return resp, err
}

// readAll reads events from the first one on, by as many streams as it takes, until until is
// closed and it has the event with the sequence in last.
func (s *served) readAll(ctx context.Context, until <-chan int, last *int) (got []int, streams int, err error) {
	ended := func() bool {
		select {
		case <-until:
			return len(got) > 0 && got[len(got)-1] >= *last
		default:
			return false
		}
	}
	after := 0
	for !ended() {
		if ctx.Err() != nil {
			return got, streams, ctx.Err()
		}
		resp, err := s.open(ctx, after)
		if err != nil { // the server is not there yet
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		streams++
		var buffer bytes.Buffer
		for !ended() {
			chunk := make([]byte, 32<<10)
			n, rerr := resp.Body.Read(chunk)
			buffer.Write(chunk[:n])
			for {
				text, rest, whole := bytes.Cut(buffer.Bytes(), []byte("\n\n"))
				if !whole {
					break
				}
				if id, found := bytes.CutPrefix(text, []byte("id: ")); found {
					line, _, _ := bytes.Cut(id, []byte("\n"))
					seq, err := strconv.Atoi(string(line))
					if err != nil {
						return got, streams, errors.Join(err, resp.Body.Close())
					}
					got, after = append(got, seq), seq
				}
				kept := bytes.Clone(rest)
				buffer.Reset()
				buffer.Write(kept)
			}
			if rerr != nil {
				break
			}
		}
		_ = resp.Body.Close()
	}
	return got[:*last], streams, nil
}
