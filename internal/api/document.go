package api

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store/views"
)

// routes is a mux that also takes the paths of custom methods, such as /runs/{run}:stop, in
// which a name and a verb share a segment.
type routes struct {
	*http.ServeMux
	verbs map[string]http.HandlerFunc // by pattern up to the name, and verb: "POST /api/v1/runs/ stop"
	taken map[string]bool             // patterns with a name in place of name and verb
}

func newRoutes() *routes {
	return &routes{ServeMux: http.NewServeMux(), verbs: map[string]http.HandlerFunc{}, taken: map[string]bool{}}
}

// HandleFunc implements [humago.Mux].
func (m *routes) HandleFunc(pattern string, handle func(http.ResponseWriter, *http.Request)) {
	before, verb, custom := strings.Cut(pattern, "}:")
	if !custom {
		m.ServeMux.HandleFunc(pattern, handle)
		return
	}
	m.verbs[before+" "+verb] = handle
	if m.taken[before] {
		return
	}
	m.taken[before] = true
	name := before[strings.LastIndexByte(before, '{')+1:]
	m.ServeMux.HandleFunc(before+"}", func(w http.ResponseWriter, r *http.Request) {
		value := r.PathValue(name)
		do, at := m.verb(before, value)
		if do == nil {
			m.refuse(w, r)
			return
		}
		r.SetPathValue(name, value[:at])
		do(w, r)
	})
}

// verb returns the handler of the verb that ends a segment, and where the verb begins.
func (m *routes) verb(before, segment string) (do http.HandlerFunc, at int) {
	if at = strings.LastIndexByte(segment, ':'); at < 0 {
		return nil, at
	}
	return m.verbs[before+" "+segment[at+1:]], at
}

// refuse answers a request that no operation has: 405 where other methods are taken.
func (m *routes) refuse(w http.ResponseWriter, r *http.Request) {
	if allow := m.allowed(r); allow != "" {
		w.Header().Set("Allow", allow)
		d := httpkit.DetailsOf(problem.Errorf(problem.Invalid, "%s takes %s, not %s", r.URL.Path, allow, r.Method))
		d.Status = http.StatusMethodNotAllowed
		write(w, d)
		return
	}
	httpkit.Refuse(w, problem.Errorf(problem.NotFound, "there is no request %s %s: %s/openapi.json lists all", r.Method, r.URL.Path, Prefix))
}

// allowed returns the methods that a path takes, for the header Allow; empty if there is no
// such path. The path of a verb takes the method of the verb alone.
func (m *routes) allowed(r *http.Request) string {
	var methods []string
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete} {
		other := r.Clone(r.Context())
		other.Method = method
		_, pattern := m.Handler(other)
		if !strings.HasPrefix(pattern, method+" ") {
			continue
		}
		if before, _, found := strings.Cut(pattern, "{"); found && m.taken[pattern[:len(pattern)-1]] {
			segment, err := url.PathUnescape(strings.TrimPrefix(r.URL.EscapedPath(), strings.TrimPrefix(before, method+" ")))
			if do, _ := m.verb(pattern[:len(pattern)-1], segment); do == nil || err != nil {
				continue
			}
			return method
		}
		methods = append(methods, method)
	}
	return strings.Join(methods, ", ")
}

// single refuses parameters that are there several times, or without a value where it is no text:
// package huma would take the first, and an empty one for a missing one.
func single(api huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		u := ctx.URL()
		query, err := url.ParseQuery(u.RawQuery)
		if err != nil {
			_ = huma.WriteErr(api, ctx, http.StatusBadRequest, "the query cannot be read", err) // a disconnected client needs no answer
			return
		}
		for _, p := range ctx.Operation().Parameters {
			if p.In == "path" || p.Schema == nil || p.Schema.Type == huma.TypeArray {
				continue
			}
			values := query[p.Name]
			if p.In == "header" {
				values = nil
				ctx.EachHeader(func(name, value string) {
					if strings.EqualFold(name, p.Name) {
						values = append(values, value)
					}
				})
			}
			why := ""
			switch {
			case len(values) > 1:
				why = "it is given several times"
			case len(values) == 1 && values[0] == "" && (p.In == "header" || p.Schema.Type != huma.TypeString):
				why = "it has no value: leave it out"
			}
			if why != "" {
				_ = huma.WriteErr(api, ctx, http.StatusBadRequest, p.Name+": "+why) // as above
				return
			}
		}
		next(ctx)
	}
}

// refusal is an error as package huma writes it.
type refusal struct {
	httpkit.Details
	again time.Duration // when to ask again; 0: the client decides
}

var (
	_ huma.StatusError  = (*refusal)(nil)
	_ huma.HeadersError = (*refusal)(nil)
)

// GetHeaders implements [huma.HeadersError].
func (r *refusal) GetHeaders() http.Header {
	if r.again == 0 {
		return nil
	}
	return http.Header{"Retry-After": {strconv.Itoa(int(r.again.Seconds()))}}
}

// Error implements error.
func (r *refusal) Error() string { return r.Detail }

// GetStatus implements [huma.StatusError].
func (r *refusal) GetStatus() int { return r.Status }

// ContentType implements [huma.ContentTypeFilter].
func (r *refusal) ContentType(string) string { return httpkit.Problem }

// refused converts an error for package huma; nil stays nil.
func refused(err error) error {
	if err == nil {
		return nil
	}
	r := &refusal{Details: httpkit.DetailsOf(err)}
	if errors.Is(err, views.ErrPreparing) {
		r.again = preparingTime
	}
	return r
}

// preparingTime is when a client asks again whether the past is prepared.
const preparingTime = 2 * time.Second

// write answers with problem details.
func write(w http.ResponseWriter, d httpkit.Details) {
	body, _ := json.Marshal(d) // strings and a number always encode
	w.Header().Set("Content-Type", httpkit.Problem)
	w.WriteHeader(d.Status)
	_, _ = w.Write(body) // a disconnected client needs no answer
}

// invalid is package huma's error for a request that does not fit the document.
func invalid(status int, message string, errs ...error) huma.StatusError {
	text := message
	for i, err := range errs {
		if i == 0 {
			text += ": "
		} else {
			text += "; "
		}
		text += err.Error()
	}
	kind := problem.Invalid
	if status >= http.StatusInternalServerError {
		kind = problem.Internal
	}
	d := httpkit.DetailsOf(problem.Errorf(kind, "%s", text))
	if status >= http.StatusBadRequest && status != http.StatusUnprocessableEntity {
		d.Status = status
	}
	return &refusal{Details: d}
}

// setErrors makes package huma write refusals: it has no other place for this than a variable.
var setErrors = sync.OnceFunc(func() { huma.NewError = invalid })

const description = `What the commands of ckptstore print with --json, the events of the log, and the decisions that
people make. Every request needs the header "Authorization: Bearer TOKEN".

Every GET takes as_of, a sequence: the answer is then that of the log up to this event, and
never changes. The header Ckpt-Sequence is the sequence that the answer covers at least.
A server that has just been started on a long log prepares these answers in the background:
until it has reached the event, the answer is 503 with Retry-After, and tells how far it is.
Errors are problem details (RFC 9457).`

// newDocument returns the API, to which operations are added.
func newDocument(mux *routes, version string) huma.API {
	setErrors()
	if version == "" {
		version = "1"
	}
	format := huma.Format{
		Marshal:   func(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) },
		Unmarshal: json.Unmarshal,
	}
	api := humago.New(mux, huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI: "3.1.0",
			Info:    &huma.Info{Title: "ckptstore", Version: version, Description: description},
			Components: &huma.Components{
				Schemas:         huma.NewMapRegistry("#/components/schemas/", schemaName),
				SecuritySchemes: map[string]*huma.SecurityScheme{"token": {Type: "http", Scheme: "bearer"}},
			},
			Security: []map[string][]string{{"token": {}}},
		},
		Formats:       map[string]huma.Format{httpkit.JSON: format, "json": format},
		DefaultFormat: httpkit.JSON,
	})
	api.UseMiddleware(single(api))
	return api
}

// schemaName names the schema of a type. Rows of package projections and bodies of package
// events share names with answers.
func schemaName(t reflect.Type, hint string) string {
	name := huma.DefaultSchemaNamer(t, hint)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Name() == "" {
		return name
	}
	switch {
	case t == reflect.TypeFor[refusal]():
		return "Problem"
	case strings.HasSuffix(t.PkgPath(), "/projections"):
		return name + "Row"
	case strings.HasSuffix(t.PkgPath(), "/events"):
		return "Logged" + name
	}
	return name
}

// requests are the schemas of bodies of requests, which may have no further members.
var requests = []string{"Fork", "Why"}

// document returns the OpenAPI document.
func (h *Handler) document() ([]byte, error) {
	text, err := json.Marshal(h.api.OpenAPI())
	if err != nil {
		return nil, err
	}
	var tree map[string]any // for sorted members
	if err := json.Unmarshal(text, &tree); err != nil {
		return nil, err
	}
	schemas, _ := tree["components"].(map[string]any)["schemas"].(map[string]any)
	for name, schema := range schemas {
		if of, ok := schema.(map[string]any); ok && !slices.Contains(requests, name) {
			delete(of, "additionalProperties") // answers may get more members
		}
	}
	out, err := json.MarshalIndent(tree, "", "  ")
	return append(out, '\n'), err
}

func (h *Handler) serveDocument(w http.ResponseWriter, _ *http.Request) {
	text, err := h.document()
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/vnd.oai.openapi+json")
	_, _ = w.Write(text) // a disconnected client needs no answer
}

// describeStream adds the stream to the document: it is written by hand, because package huma
// wants a type for each event and writes no comments.
func describeStream(api huma.API) {
	whole := func(text string) *huma.Schema {
		return &huma.Schema{Type: "integer", Minimum: new(float64), Description: text}
	}
	text := &huma.Schema{Type: "string"}
	parameters := []*huma.Param{
		{Name: "after", In: "query", Description: "Begin after this sequence; without it and Last-Event-ID: at the end of the log", Schema: whole("")},
		{Name: "Last-Event-ID", In: "header", Description: "The same, as browsers send it", Schema: whole("")},
		{Name: "run", In: "query", Description: "Only events of this run", Schema: text},
		{Name: "type", In: "query", Description: "Only events of this type, such as checkpoint.*; repeatable", Schema: &huma.Schema{Type: "array", Items: text}},
	}
	api.OpenAPI().AddOperation(&huma.Operation{
		OperationID: "stream", Method: http.MethodGet, Path: Prefix + "/stream", Tags: []string{"events"},
		Summary: "Follow the events of the log",
		Description: "Server-sent events. A message without a name is one event of the log, as in /events/{sequence}; its id is the sequence. " +
			"The message caught-up follows the last event that was in the log when the request came. The message lagged is the last of a stream " +
			"whose reader is too slow: connect again with the id of its last event. The message unauthorized is the last of a stream whose token " +
			"was revoked, has expired, or has another role; its data are problem details. A comment comes every 15 s.",
		Parameters: parameters,
		Responses: map[string]*huma.Response{
			"200":     {Description: "OK", Content: map[string]*huma.MediaType{"text/event-stream": {Schema: &huma.Schema{Type: "string"}}}},
			"default": {Description: "Error", Content: map[string]*huma.MediaType{httpkit.Problem: {Schema: &huma.Schema{Ref: "#/components/schemas/Problem"}}}},
		},
	})
}

// tags are the groups of operations.
var tags = []string{"store", "runs", "checkpoints", "events", "access", "decisions"}

// operation returns an operation of the document. The path is relative to [Prefix].
func operation(method, path, id, tag, summary, more string) huma.Operation {
	if !slices.Contains(tags, tag) {
		panic("no group " + tag)
	}
	return huma.Operation{
		OperationID: id, Method: method, Path: Prefix + path, Tags: []string{tag}, Summary: summary, Description: more,
		MaxBodyBytes: maxBody,
	}
}

// maxBody is the length of the longest request, in bytes.
const maxBody = 64 << 10
