{{- define "mla.name" -}}
{{- $name := ternary .Release.Name (printf "%s-mla-router" .Release.Name) (contains "mla-router" .Release.Name) -}}
{{- $name | trunc 44 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that select the pods of one component: dict "root" . "component" "router" */}}
{{- define "mla.selector" -}}
app.kubernetes.io/name: mla-router
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "mla.labels" -}}
{{ include "mla.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "mla.image" -}}
{{- .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}{{ .suffix }}
{{- end }}

{{- define "mla.secret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "mla.name" .)) }}
{{- end }}

{{/* An environment variable from a Secret: dict "name" "X" "secret" "s" "key" "k" */}}
{{- define "mla.fromSecret" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef: { name: {{ .secret }}, key: {{ .key }} }
{{- end }}

{{/* Flags of a command as arguments: true is a flag without a value, a list has several values. Whole numbers are read
     as floats, which would be printed with an exponent from 2^24 on. */}}
{{- define "mla.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- --{{ $name }}
{{- end }}
{{- else if kindIs "slice" $value }}
- --{{ $name }}
{{- range $value }}
- {{ include "mla.text" . | quote }}
{{- end }}
{{- else }}
- {{ printf "--%s=%s" $name (include "mla.text" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "mla.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- define "mla.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{/* Scheduling of a component's pods: the component's values. */}}
{{- define "mla.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
